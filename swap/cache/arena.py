"""The bounded memory that weights are computed from: entries, and how bytes get into them.

On a CPU an entry is a range of a host slab, bytes are read straight into it and computed with where
they are. Every range is its own storage and returns to the slab when the last tensor over it is
gone: autograd may hold one longer than we do, so evicting only ever means dropping our reference.

What is held can lie anywhere, and what is free between may be no range that is large enough. A
budget that works must not depend on that: weights that are needed now get memory of their own then,
in place of pages between (``Slab.allocate``). So there is room when so many bytes are free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from aio import Operation, Slab
from swap.device.interface import Event
from swap.kernels import copy_values
from swap.plan.layout import ParameterSpec
from swap.storage.components import as_tensor


@dataclass(slots=True, eq=False)
class Entry:
    """One parameter's weights in the arena.

    ``weight`` is what is computed with, ``numel`` elements. ``operations`` are the reads still in
    flight, ``missing`` the subgroups whose updated part has not been delivered. ``landing`` (host,
    padded for aligned reads) is where reads go, ``landed`` the (start, length) of what they bring;
    ``event`` is set by arenas that copy asynchronously; ``is_ahead``: nobody asked for it yet.
    """

    spec: ParameterSpec
    weight: torch.Tensor
    landing: torch.Tensor | None = None
    operations: list[Operation] = field(default_factory=list)
    landed: list[tuple[int, int]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    event: Event | None = None
    is_ahead: bool = False

    @property
    def is_reading(self) -> bool:
        return bool(self.operations)

    def finished_reading(self) -> bool:
        return all(operation.done() for operation in self.operations)


class Transfer(Protocol):
    """Bytes on their way: an operation of the engine, or a copy from a device."""

    def done(self) -> bool:
        """Whether they have arrived, or never will."""

    def result(self) -> object:
        """Wait for them. Raises what kept them from arriving."""


class Arena(Protocol):
    """Where weights are computed from.

    ``uses_home``: weights at home in HOST are computed with there, without an entry.
    """

    uses_home: bool

    @property
    def pace_bytes(self) -> int:
        """Weights are read ahead each time when a part of so many bytes has been used."""

    def can_land(self, spec: ParameterSpec) -> bool:
        """Whether ``new`` finds a landing buffer, if it finds room for the entry."""

    def new(self, spec: ParameterSpec, *, landing: bool, apart: bool = False) -> Entry:
        """An empty entry, with a landing buffer for reads if asked; raises ``SlabFullError``.

        With ``apart`` it does so only if fewer bytes are free than asked for, wherever they are;
        that may be slower.
        """

    def fill(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        """Copy host ``values`` to elements from ``start``; they must stay until ``ready``."""

    def put(self, entry: Entry, start: int, values: torch.Tensor) -> Transfer | None:
        """As ``fill``; ``values`` may be reused when what is returned is done, at once if that is
        None.
        """

    def note_released(self) -> None:
        """Entries were let go of: what comes in their place waits for no more than what is computed
        until now. Raises nothing: what cannot be noted is told where room is wanted.
        """

    def wait_for_copies_from(self, values: torch.Tensor | None) -> None:
        """Wait until no entry is to be copied from ``values`` any more, which are to change; None:
        from anywhere.
        """

    def arrived(self, entry: Entry) -> None:
        """All reads of ``entry`` are finished. Where this raises, it can be called again."""

    def ready(self, entry: Entry) -> torch.Tensor:
        """The weights, safe to compute with on the current stream."""

    def read_back(self, entry: Entry, start: int, out: torch.Tensor) -> Transfer | None:
        """Copy elements from ``start`` to host memory ``out``; None if they are there on return."""

    def wait_for_release(self, timeout: float) -> bool:
        """Wait until some memory came back; False on timeout."""

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, by entries or by tensors of the program."""

    @property
    def peak_bytes(self) -> int:
        """Largest ``used_bytes`` so far."""


class HostArena:
    """Entries are ranges of a host slab."""

    uses_home = True

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    @property
    def pace_bytes(self) -> int:
        return self._slab.nbytes

    def can_land(self, spec: ParameterSpec) -> bool:
        return True  # in the entry itself

    def new(self, spec: ParameterSpec, *, landing: bool, apart: bool = False) -> Entry:
        memory = self._slab.allocate(spec.padded_numel * spec.dtype.itemsize, apart=apart)
        padded = as_tensor(memory, spec.dtype)
        return Entry(spec=spec, weight=padded[: spec.numel], landing=padded)

    def fill(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        copy_values(values, entry.weight[start : start + values.numel()])

    def put(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        self.fill(entry, start, values)

    def note_released(self) -> None:
        """What was computed here is done."""

    def wait_for_copies_from(self, values: torch.Tensor | None) -> None:
        """They are over when they return."""

    def arrived(self, entry: Entry) -> None:
        """Nothing is left to do: the bytes are where they are computed with."""

    def ready(self, entry: Entry) -> torch.Tensor:
        return entry.weight

    def read_back(self, entry: Entry, start: int, out: torch.Tensor) -> None:
        copy_values(entry.weight[start : start + out.numel()], out)

    def wait_for_release(self, timeout: float) -> bool:
        return self._slab.wait_for_release(timeout)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    @property
    def used_bytes(self) -> int:
        return self._slab.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._slab.peak_bytes
