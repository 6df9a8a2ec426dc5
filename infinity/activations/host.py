"""``activations="host"``: saved tensors in host memory."""

from __future__ import annotations

import torch

from infinity.activations.copies import Ahead, DeviceCopies
from infinity.activations.offloading import Activations
from infinity.activations.storage import SavedStorage, bytes_of
from swap.device.interface import ComputeDevice


class HostActivations(Activations):
    """Saved tensors in host memory. On a CPU they are there already, and are counted.

    From a ``device`` with memory of its own they are copied down, up to ``budget_bytes``; beyond
    that they stay.
    """

    def __init__(
        self, where: torch.device, budget_bytes: int, device: ComputeDevice | None = None
    ) -> None:
        super().__init__()
        self._where = where
        self.budget_bytes = budget_bytes
        self._copies = None if device is None else DeviceCopies(device, budget_bytes)
        self._ahead = Ahead(self._copies)

    def close(self) -> None:
        super().close()
        if self._copies is not None:
            self._copies.close()

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        return (
            not self._closed
            and tensor.device.type == self._where.type
            and self._is_large_and_plain(tensor)
        )

    def _admit(self, tensor: torch.Tensor) -> SavedStorage | None:
        there = bytes_of(tensor)
        if self._copies is None:
            storage = self._add(tensor, there)
        else:
            memory = self._copies.memory(there.numel())
            if memory is None:
                return None
            storage = self._add(tensor, memory)
            storage.is_copy = True
            self._copies.bring_down(storage, there)
        self._hold(storage.nbytes)
        return storage

    def _memory_of(self, storage: SavedStorage) -> torch.Tensor:
        memory = super()._memory_of(storage)
        return memory if self._copies is None else self._copies.on_device(storage)

    def _restored(self, storage: SavedStorage) -> None:
        self._ahead.follow(storage.number, self._alive, lambda other: other.memory is not None)

    def _take_stock(self) -> None:
        super()._take_stock()
        self._ahead.take_stock(self._alive)

    def _forget(self, storage: SavedStorage) -> None:
        super()._forget(storage)
        self._ahead.drop(storage)
