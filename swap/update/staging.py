"""Subgroups in staging slots: components are read, worked on, written to new extents, published.

Published extents are replaced only when every write of the new ones is complete, so until then the
subgroup is on the SSDs as it was before. Nothing here decides an order, waits for another subgroup
or knows what the work is. Components in host memory are worked on where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from aio import AioError, Operation
from swap.plan.layout import Subgroup
from swap.storage.components import ComponentStore, as_bytes, as_tensor, clear_values
from swap.storage.extents import Extent, ExtentStore
from swap.timeline import Timeline


@dataclass(slots=True, eq=False)
class Staged:
    """One subgroup on its way, with the staging slot that it occupies."""

    subgroup: Subgroup
    slot: np.ndarray | None = None
    components: dict[str, torch.Tensor] = field(default_factory=dict)
    reads: list[Operation] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    writes: list[Operation] = field(default_factory=list)

    def lay_out(self, used: int, nbytes: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """The slot from byte ``used`` on as a tensor, and the byte after it."""
        assert self.slot is not None
        stop = used + nbytes
        return stop, as_tensor(self.slot[used:stop], dtype)


S = TypeVar("S", bound=Staged)


class Staging(Generic[S]):
    """What to do with a staged subgroup. Used by one thread; free ``slots`` may be shared."""

    def __init__(
        self,
        components: ComponentStore,
        extents: ExtentStore | None,
        slots: deque[np.ndarray],
        timeline: Timeline,
    ) -> None:
        self._components = components
        self._extents = extents
        self._slots = slots
        self._timeline = timeline

    def can_start(self, subgroup: Subgroup) -> bool:
        """Whether ``subgroup`` needs no slot, or there is one."""
        return bool(self._slots) or not self._needs_slot(subgroup)

    def start(self, staged: S) -> None:
        """Take a slot, and start the reads that the work needs. Raises ``AioError``; the slot is
        free again then.
        """
        assert staged.slot is None
        if self._needs_slot(staged.subgroup):
            staged.slot = self._slots.popleft()
        try:
            self._prepare(staged)
        except BaseException:
            self.abandon(staged)
            raise

    def is_read(self, staged: S) -> bool:
        return all(operation.done() for operation in staged.reads)

    def finish_read(self, staged: S) -> None:
        """Wait for the reads; raises ``AioError``."""
        for operation in staged.reads:
            operation.result()
        staged.reads.clear()

    def start_write(self, staged: S) -> None:
        """Start writing to new extents; components in HOST are at home already."""
        if self._components.is_host(staged.subgroup.index):
            return
        assert self._extents is not None
        for name, values in staged.components.items():
            data = as_bytes(values)
            extent = self._extents.allocate(data.nbytes)
            staged.extents[name] = extent
            self._begin(staged, staged.writes, partial(self._extents.write, extent, 0, data), name)

    def is_written(self, staged: S) -> bool:
        return all(operation.done() for operation in staged.writes)

    def finish_write(self, staged: S) -> None:
        """Wait until the new extents are written; raises ``AioError``."""
        for operation in staged.writes:
            operation.result()
        staged.writes.clear()

    def publish(self, staged: S) -> None:
        """Wait for the writes; then the new extents replace the old ones, and the slot is free."""
        self.finish_write(staged)
        if staged.extents:
            self._components.publish(staged.subgroup.index, staged.extents)
            staged.extents = {}
        self.release_slot(staged)

    def undo_write(self, staged: S) -> None:
        """Let transfers end and give the new extents back. The slot keeps what it holds."""
        for operation in (*staged.reads, *staged.writes):
            _let_end(operation)
        staged.reads.clear()
        staged.writes.clear()
        for extent in staged.extents.values():
            assert self._extents is not None
            self._extents.release(extent)
        staged.extents = {}

    def abandon(self, staged: S) -> None:
        """Leave the subgroup as it is published: let transfers end, give extents and slot back."""
        self.undo_write(staged)
        self.release_slot(staged)

    def release_slot(self, staged: S) -> None:
        """Of what is written, and may still have to be published."""
        staged.components = {}
        if staged.slot is not None:
            self._slots.append(staged.slot)
            staged.slot = None

    def _needs_slot(self, subgroup: Subgroup) -> bool:
        return not self._components.is_host(subgroup.index)

    def _prepare(self, staged: S) -> None:
        self._lay_out(staged)
        self._read_components(staged)

    def _lay_out(self, staged: S) -> int:
        """Lay the components out in the slot, each from a page on; returns the byte after them."""
        group, used = staged.subgroup, 0
        for name in self._components.names(group.index):
            if self._components.is_host(group.index):
                staged.components[name] = self._components.host(group.index, name)
                continue
            kept = self._components.component(group.index, name)
            nbytes = kept.nbytes(group.numel)
            used, staged.components[name] = staged.lay_out(used, nbytes, kept.dtype)
        return used

    def _read_components(self, staged: S) -> None:
        index = staged.subgroup.index
        if self._components.is_host(index):
            return
        for name, values in staged.components.items():
            if self._components.extent(index, name) is None:
                clear_values(values)
            else:
                self._read_component(staged, name)

    def _read_component(self, staged: S, name: str) -> None:
        self._read(staged, name, 0, staged.components[name].numel())

    def _read(self, staged: S, name: str, first: int, last: int) -> None:
        assert self._extents is not None
        extent = self._components.extent(staged.subgroup.index, name)
        assert extent is not None
        part = staged.components[name][first:last]
        start = first * part.dtype.itemsize
        submit = partial(self._extents.read, extent, start, as_bytes(part), urgent=False)
        self._begin(staged, staged.reads, submit, name)

    def _begin(
        self, staged: S, noted: list[Operation], submit: Callable[[], Operation], name: str
    ) -> None:
        """A transfer of the slot, which no other subgroup gets while it is under way."""
        assert self._extents is not None
        label = f"subgroup {staged.subgroup.index} {name}"
        purpose = "weights" if name == "weight" else "state"
        self._extents.run_drained(
            lambda: noted.append(self._timeline.watch(submit(), label, purpose=purpose))
        )


def _let_end(operation: Operation) -> None:
    """Wait for a transfer whose outcome no longer matters: its failure has been, or will be,
    reported by another.
    """
    try:
        operation.result()
    except AioError:
        return
