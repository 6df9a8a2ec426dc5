"""Where saved tensors are between forward and backward: ``activations="keep" | "host" | "nvme"``.

A backward pass asks for saved tensors in the opposite of the order in which they were saved. So the
latest ones stay in memory, the oldest go to NVMe, and while a backward pass works on one tensor,
those that were saved before it are read. Nothing is written before half of the budget is full: what
fits costs no I/O.

On a CPU a saved tensor lies in memory of the program, as long as that refers to it: a batch, the
data set that the batch is a slice of, the buffer of a rollout. It is *lent*: it counts for nothing,
is not written, and becomes the library's when the program lets go of it.

Invariant: the memory held is at most the budget when a call returns, with what the engine still
writes of storages that nobody needs any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import torch

from aio import AioError
from infinity.activations.copies import Ahead, DeviceCopies
from infinity.activations.host import HostActivations
from infinity.activations.offloading import Activations, is_of_program
from infinity.activations.storage import ENGINE_BYTES, SavedStorage, Volume, bytes_of
from swap.device.interface import ComputeDevice
from swap.device.opening import is_separate
from swap.interruptions.undo import Undo
from swap.memory.heap import give_back_freed_memory
from swap.plan import eviction
from swap.storage.components import page_aligned
from swap.tiers import Budget
from swap.timeline import Timeline

Mode = Literal["keep", "host", "nvme"]
MODES: tuple[Mode, ...] = ("keep", "host", "nvme")
MIN_BUDGET_BYTES = 4 * 1024 * 1024
"""Least memory for saved tensors, beside what the engine takes."""
_BUDGET_SHARES = {"host": 0.25, "nvme": 0.125}
_UNWRITTEN_SHARE = 0.5
"""Part of the budget that may be unwritten; what is more is being written."""
_FREED_SHARE = 0.5
"""So much is let go, in parts of the budget, before freed memory is given back to the system."""
_LOOKAHEAD = 64
"""So many storages before the one that is asked for may be read ahead."""


class NvmeActivations(Activations):
    """Saved tensors on NVMe but for the latest ``budget_bytes``. ``undo`` removes the files, also
    where making this is interrupted.

    Raises ``OSError`` subclasses naming a directory that cannot be used.
    """

    def __init__(
        self,
        where: torch.device,
        budget_bytes: int,
        directories: Sequence[str],
        timeline: Timeline,
        device: ComputeDevice | None = None,
        undo: Undo | None = None,
    ) -> None:
        super().__init__()
        self._where = where
        self.budget_bytes = budget_bytes
        self._copies = None if device is None else DeviceCopies(device, budget_bytes)
        self._ahead = Ahead(self._copies)
        self._volume = Volume(directories, timeline, undo)
        self._engine_bytes = ENGINE_BYTES * len(directories)
        self._in_memory: dict[int, SavedStorage] = {}
        self._lent: dict[int, SavedStorage] = {}
        self._memories: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        """By storage, for all that is saved of it: what these refer to is one tensor."""
        self._policy = eviction.for_saved()
        self._current = 0
        self._freed_bytes = 0

    @property
    def peak_budget_bytes(self) -> int:
        return self.peak_bytes + self._engine_bytes

    def close(self) -> None:
        super().close()
        self._in_memory.clear()
        self._lent.clear()
        self._volume.close()
        if self._copies is not None:
            self._copies.close()

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        return (
            not self._closed
            and tensor.device.type == self._where.type
            and self._is_large_and_plain(tensor)
            and (tensor.untyped_storage().resizable() or _is_computed(tensor))
        )

    def _admit(self, tensor: torch.Tensor) -> SavedStorage | None:
        if self._copies is not None:
            return self._admit_copy(tensor, self._copies)
        storage = self._add(tensor, self._memory_for(tensor))
        self._lent[storage.number] = storage
        return storage

    def _admit_copy(self, tensor: torch.Tensor, copies: DeviceCopies) -> SavedStorage | None:
        there = bytes_of(tensor)
        memory = self._memory_known(there.numel(), copies)
        if memory is None:
            return None
        storage = self._add(tensor, memory)
        storage.is_copy = True
        copies.bring_down(storage, there)
        self._in_memory[storage.number] = storage
        self._hold(storage.nbytes)
        return storage

    def _memory_known(self, nbytes: int, copies: DeviceCopies) -> torch.Tensor | None:
        """Memory that the device knows, for which others are written; None where that is not
        enough. Raises ``AioError``.
        """
        if nbytes > self.budget_bytes:
            return None
        self._fit(nbytes)
        while (memory := copies.memory(nbytes)) is None:  # what is free is in pieces
            number = self._policy.victim(self._in_memory)
            if number is not None:
                self._evict(self._in_memory[number])
            elif self._volume.leaving_bytes:
                self._volume.wait_for_leaving()
            else:
                return None
        return memory

    def _is_here(self, storage: SavedStorage) -> bool:
        """Whether the memory of a storage holds its bytes, without waiting for any."""
        if storage.memory is None or storage.read is None:
            return storage.memory is not None
        if not storage.read.done():
            return False
        try:
            self._volume.finish_read(storage)
        except AioError:  # whoever asks for it reads it again, and is told then
            self._out_of_memory(storage)
        return storage.memory is not None

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = bytes_of(tensor)
        known = self._memories.get(tensor.untyped_storage()._cdata)
        if known is not None and known.numel() == whole.numel():
            return known
        self._memories[tensor.untyped_storage()._cdata] = whole
        return whole

    def _saved(self, storage: SavedStorage) -> None:
        self._current = max(self._current, storage.number)
        self._policy.added(storage.number)
        self._take_back()
        self._write_behind()
        self._fit(0)
        self._give_back()

    def _nvme_bytes(self) -> int:
        return self._volume.used_bytes

    def _taken_bytes(self) -> int:
        return self.held_bytes + self._volume.leaving_bytes

    def _memory_of(self, storage: SavedStorage) -> torch.Tensor:
        self._current = storage.number
        self._policy.used(storage.number)
        if storage.memory is None and storage.take_again():
            self._in_again(storage)
        if storage.memory is None:
            self._fit(min(storage.nbytes, self.budget_bytes))
            self._start_read(storage, urgent=True)
        try:
            self._volume.finish_read(storage)
        except AioError:
            self._out_of_memory(storage)
            raise
        memory = super()._memory_of(storage)
        return memory if self._copies is None else self._copies.on_device(storage)

    def _restored(self, storage: SavedStorage) -> None:
        self._take_back()
        self._fit(0)
        self._read_ahead()
        self._ahead.follow(storage.number, self._alive, self._is_here)
        self._give_back()

    def _take_stock(self) -> None:
        if self._closed:
            return
        alive = self._alive.values()
        self._volume.take_stock(alive)
        self._ahead.take_stock(self._alive)
        in_memory = {s.number: s for s in alive if s.memory is not None}
        self._lent = {n: s for n, s in in_memory.items() if s.is_held_elsewhere}
        self._in_memory = {n: s for n, s in in_memory.items() if n not in self._lent}
        self.held_bytes = 0
        for storage in self._in_memory.values():
            self._hold(storage.nbytes)

    def _forget(self, storage: SavedStorage) -> None:
        if storage.memory is not None:
            self._out_of_memory(storage)
        self._lent.pop(storage.number, None)
        self._ahead.drop(storage)
        self._volume.discard(storage)
        self._policy.gone(storage.number)

    # Moving.

    def _take_back(self) -> None:
        """What the program has let go of since the last call is the library's."""
        for storage in [s for s in self._lent.values() if not s.is_held_elsewhere]:
            self._in_memory[storage.number] = self._lent.pop(storage.number)
            self._hold(storage.nbytes)

    def _fit(self, nbytes: int) -> None:
        """Make room for ``nbytes`` more, waiting for writes. Raises ``AioError``; what could not
        be written stays in memory.
        """
        while self._taken_bytes() + nbytes > self.budget_bytes:
            if self._volume.leaving_bytes:
                self._volume.wait_for_leaving()
            elif (number := self._policy.victim(self._in_memory)) is not None:
                self._evict(self._in_memory[number])
            else:
                return

    def _has_room(self, storage: SavedStorage) -> bool:
        """Make room for ``storage`` without waiting, by what is worth less; False if that fails."""
        while self._taken_bytes() + storage.nbytes > self.budget_bytes:
            number = self._policy.victim(self._in_memory, ahead_for=storage.number)
            victim = None if number is None else self._in_memory[number]
            if victim is None or victim.is_moving or victim.extent is None:
                return False
            try:
                self._evict(victim)
            except AioError:  # it stays, and is reported when there is no other way
                return False
        return True

    def _evict(self, storage: SavedStorage) -> None:
        try:
            self._volume.finish_read(storage)
        except AioError:  # whoever needs it reads it again, and is told then
            self._out_of_memory(storage)
            return
        self._volume.finish_write(storage)
        self._out_of_memory(storage)

    def _write_behind(self) -> None:
        """Start writing the oldest, so that no more than a part of the budget is unwritten."""
        unwritten = [s for _, s in sorted(self._in_memory.items()) if s.extent is None]
        nbytes = sum(storage.nbytes for storage in unwritten)
        for storage in unwritten:
            if nbytes <= self.budget_bytes * _UNWRITTEN_SHARE or not storage.has_arrived:
                return
            self._volume.start_write(storage)
            nbytes -= storage.nbytes

    def _read_ahead(self) -> None:
        for number in range(self._current - 1, max(-1, self._current - 1 - _LOOKAHEAD), -1):
            storage = self._alive.get(number)
            if storage is None or storage.memory is not None:
                continue
            if not self._has_room(storage):
                return
            self._start_read(storage, urgent=False)

    def _start_read(self, storage: SavedStorage, *, urgent: bool) -> None:
        memory = self._memory_to_read(storage.nbytes, urgent=urgent)
        if memory is not None:
            self._volume.start_read(storage, memory, urgent=urgent)
            self._in_again(storage)

    def _memory_to_read(self, nbytes: int, *, urgent: bool) -> torch.Tensor | None:
        """None where what is not ``urgent`` would have to wait. Raises ``AioError``."""
        if self._copies is None:
            return page_aligned(nbytes)
        if urgent:
            memory = self._memory_known(nbytes, self._copies)
            assert memory is not None, "it had memory when it was saved"
            return memory
        return self._copies.memory(nbytes, waits=False)

    def _in_again(self, storage: SavedStorage) -> None:
        self._in_memory[storage.number] = storage
        self._policy.added(storage.number)
        self._hold(storage.nbytes)

    def _out_of_memory(self, storage: SavedStorage) -> None:
        storage.memory = None
        if self._in_memory.pop(storage.number, None) is not None:
            self._hold(-storage.nbytes)
            self._freed_bytes += storage.nbytes

    def _give_back(self) -> None:
        """Memory that was let go shall be memory that is free."""
        if self._freed_bytes > self.budget_bytes * _FREED_SHARE:
            give_back_freed_memory()
            self._freed_bytes = 0


def _is_computed(tensor: torch.Tensor) -> bool:
    """Whether an operation of torch has made its memory, which numpy has looked at then. What torch
    does not resize, and was not made so or was written to since, may be memory of numpy's, of a
    file or of other processes: who else refers to that is not known.
    """
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    return node is not None and base._version == 0 and not is_of_program(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShare:
    """The part of the host budget that is for saved tensors, and what is left for the rest.

    On a CPU ``"host"`` takes none: what is kept there is the program's own memory.
    """

    mode: Mode
    device: torch.device
    num_directories: int

    def bytes_of(self, host_bytes: int) -> int:
        """The part of a budget of ``host_bytes``."""
        if self.mode == "keep" or (self.mode == "host" and not is_separate(self.device)):
            return 0
        least = MIN_BUDGET_BYTES + self.engine_bytes
        return max(least, int(host_bytes * _BUDGET_SHARES[self.mode]))

    @property
    def engine_bytes(self) -> int:
        """What the engine takes of it."""
        return self.num_directories * ENGINE_BYTES if self.mode == "nvme" else 0

    def rest_of(self, budget: Budget) -> Budget:
        """The budget for everything else."""
        rest = max(0, budget.host_bytes - self.bytes_of(budget.host_bytes))
        return Budget(host_bytes=rest, device_bytes=budget.device_bytes)

    def least_for(self, rest_bytes: int) -> int:
        """The least budget that leaves ``rest_bytes`` for everything else."""
        least = rest_bytes
        while least - self.bytes_of(least) < rest_bytes:
            least = rest_bytes + self.bytes_of(least)
        return least


def activations_for(
    share: ActivationShare,
    host_bytes: int,
    directories: Sequence[str],
    timeline: Timeline,
    device: ComputeDevice | None = None,
    undo: Undo | None = None,
) -> Activations:
    """What the mode means, within its share of ``host_bytes``; ``device`` is what stands for one
    that has memory of its own, ``undo`` is as of ``NvmeActivations``. Raises ``OSError`` subclasses
    naming a directory that cannot be used.
    """
    budget_bytes = share.bytes_of(host_bytes) - share.engine_bytes
    if share.mode == "nvme":
        return NvmeActivations(share.device, budget_bytes, directories, timeline, device, undo)
    if share.mode == "host":
        return HostActivations(share.device, budget_bytes, device)
    return Activations()


def mode_of(activations: str) -> Mode:
    """The argument of ``offload``. Raises ``ValueError`` for what is no mode."""
    for mode in MODES:
        if activations == mode:
            return mode
    raise ValueError(f"activations={activations!r} is not one of {', '.join(map(repr, MODES))}")
