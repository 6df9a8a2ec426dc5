"""Subgroups in staging slots: components are read, worked on, written to new extents, published.

Published extents are replaced only when every write of the new ones is complete, so until then the
subgroup is on the SSDs as it was before. Nothing here decides an order, waits for another subgroup
or knows what the work is. Components in host memory are worked on where they are, or aside: in the
spare block of their subgroup, which takes their place when it is published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from aio import AioError, Operation
from swap.cache.arena import Transfer
from swap.interruptions.mixture import Mixture
from swap.plan.layout import Subgroup
from swap.plan.slots import Place, SlotPlan, plan_slot
from swap.storage.components import ComponentStore, as_tensor
from swap.storage.extents import Extent
from swap.timeline import Timeline
from swap.update.runs import Part, runs_of


@dataclass(slots=True, eq=False)
class Staged:
    """One subgroup on its way, with the staging slot that it occupies; ``plan`` says what lies
    where in it. ``is_aside``: what is in host memory is not to change before it is published.
    """

    subgroup: Subgroup
    slot: np.ndarray | None = None
    components: dict[str, torch.Tensor] = field(default_factory=dict)
    plan: SlotPlan | None = None
    reads: list[Transfer] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    writes: list[Transfer] = field(default_factory=list)
    is_aside: bool = field(default=False, kw_only=True)

    def lay_out(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Bytes ``[start, stop)`` of the slot."""
        assert self.slot is not None
        return as_tensor(self.slot[start:stop], dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Lost:
    """A slot, or what is at home, that copies of a device may still be at."""

    slot: np.ndarray | None
    components: dict[str, torch.Tensor]
    transfers: tuple[Transfer, ...]

    def is_over(self) -> bool:
        try:
            return are_done(self.transfers)
        except Exception:  # of a device that fails still
            return False


S = TypeVar("S", bound=Staged)
Submit = Callable[[Extent, int, np.ndarray], Operation]


class Staging(Generic[S]):
    """What to do with a staged subgroup. Used by one thread; free ``slots`` may be shared."""

    def __init__(
        self,
        components: ComponentStore,
        slots: deque[np.ndarray],
        timeline: Timeline,
    ) -> None:
        self._components = components
        self._slots = slots
        self._timeline = timeline
        self._lost: list[_Lost] = []
        """Until the device tells the end of its copies."""

    @property
    def mixture(self) -> Mixture:
        return self._components.mixture

    def can_start(self, subgroup: Subgroup) -> bool:
        """Whether ``subgroup`` needs no slot, or there is one."""
        if not self._slots:
            self._take_back()
        return bool(self._slots) or not self.needs_slot(subgroup)

    def start(self, staged: S) -> None:
        """Take a slot, and start the reads that the work needs. Raises ``AioError``; the slot is
        free again then.
        """
        assert staged.slot is None
        if self.needs_slot(staged.subgroup):
            staged.slot = self._slots.popleft()
        try:
            self._prepare(staged)
        except BaseException:
            self.abandon(staged)
            raise

    def is_read(self, staged: S) -> bool:
        return are_done(staged.reads)

    def finish_read(self, staged: S) -> None:
        """Wait for the reads; raises ``AioError``."""
        for operation in staged.reads:
            operation.result()
        staged.reads.clear()

    def start_write(self, staged: S) -> None:
        """Start writing to new extents; of arrays there is nothing to write."""
        if self._components.is_array(staged.subgroup.index):
            return
        assert staged.plan is not None
        for places, sizes in staged.plan.runs:
            self._allocate(staged, places, sizes)
        parts = [
            Part(place.name, staged.extents[place.name], 0, place.start, place.nbytes)
            for place in staged.plan.places
        ]
        self._begin(staged, staged.writes, self._components.nvme.write, parts)

    def is_written(self, staged: S) -> bool:
        return are_done(staged.writes)

    def finish_write(self, staged: S) -> None:
        """Wait until the new extents are written; raises ``AioError``."""
        for operation in staged.writes:
            try:
                operation.result()
            except AioError as failure:
                self._components.nvme.avoid(failure)
                raise
        staged.writes.clear()

    def publish(self, staged: S) -> None:
        """Wait for the writes; then the new extents replace the old ones, and the slot is free."""
        self.finish_write(staged)
        if staged.extents:
            extents, staged.extents = staged.extents, {}  # they are nobody's to release any more
            self._components.publish(staged.subgroup.index, extents)
        if self._is_beside_home(staged):
            self._components.arrays.on_host.publish(staged.subgroup.index)
        self.release_slot(staged)

    def undo_write(self, staged: S) -> None:
        """Let transfers end and give the new extents back. The slot keeps what it holds; one that a
        device has not let go of, as its waits fail, is nobody's until it has.
        """
        transfers = (*staged.reads, *staged.writes)
        ended = [_has_ended(operation) for operation in transfers]
        if not all(ended):
            self._lost.append(_Lost(staged.slot, staged.components, transfers))
            staged.slot = None
        staged.reads.clear()
        staged.writes.clear()
        while staged.extents:  # none of them twice, where there is no memory and this is repeated
            self._components.nvme.release(staged.extents.popitem()[1])

    def abandon(self, staged: S) -> None:
        """Leave the subgroup as it is published: let transfers end, give extents and slot back."""
        self.undo_write(staged)
        self.release_slot(staged)

    def release_slot(self, staged: S) -> None:
        """Of what is written, and may still have to be published."""
        staged.components, staged.plan = {}, None
        if staged.slot is not None:
            self._slots.append(staged.slot)
            staged.slot = None

    def _take_back(self) -> None:
        """What a device has let go of by now."""
        over = [lost for lost in self._lost if lost.is_over()]
        self._lost = [lost for lost in self._lost if lost not in over]
        self._slots.extend(lost.slot for lost in over if lost.slot is not None)

    def _is_beside_home(self, staged: S) -> bool:
        """Whether it is worked on in a spare block."""
        return staged.is_aside and self._components.is_array(staged.subgroup.index)

    def needs_slot(self, subgroup: Subgroup) -> bool:
        """Whether anything of it has to be read."""
        return not self._components.is_array(subgroup.index)

    def _prepare(self, staged: S) -> None:
        self._lay_out(staged)
        self._read_components(staged)

    def _lay_out(self, staged: S) -> int:
        """Lay the components out in the slot, each from a page on; returns the byte after them."""
        group = staged.subgroup
        if self._is_beside_home(staged):
            staged.components.update(self._components.arrays.on_host.spare(group.index))
            return 0
        if self._components.is_array(group.index):
            for name in self._components.names(group.index):
                staged.components[name] = self._components.arrays.of(group.index, name)
            return 0
        staged.plan = plan_slot(self._components.all_of(group.index), group.numel)
        for place in staged.plan.places:
            staged.components[place.name] = staged.lay_out(place.start, place.stop, place.dtype)
        return staged.plan.nbytes

    def _read_components(self, staged: S) -> None:
        """Of components in host memory there is nothing to read."""
        if staged.plan is None:
            return
        assert staged.slot is not None
        parts: list[Part] = []
        published = self._components.extents(staged.subgroup.index)
        for place in staged.plan.places:
            extent = published[place.name]
            if extent is None:
                staged.slot[place.start : place.stop].fill(0)
            else:
                parts += self._parts_to_read(staged, place, extent)
        self._begin(staged, staged.reads, partial(self._components.nvme.read, urgent=False), parts)

    def _parts_to_read(self, staged: S, place: Place, extent: Extent) -> Iterable[Part]:
        """Of a component that is on NVMe."""
        return (Part(place.name, extent, 0, place.start, place.nbytes),)

    def _allocate(self, staged: S, places: Sequence[Place], sizes: Sequence[int]) -> None:
        """New extents for components, side by side as in the slot if there is room for that."""
        adjacent = self._components.nvme.allocate_adjacent(sizes)
        for index, place in enumerate(places):
            extent = adjacent[index] if adjacent else self._components.nvme.allocate(place.nbytes)
            staged.extents[place.name] = extent

    def _begin(
        self, staged: S, noted: list[Transfer], submit: Submit, parts: Iterable[Part]
    ) -> None:
        """Transfers of the slot, which no other subgroup gets while they are under way."""
        self._components.nvme.run_drained(partial(self._begin_runs, staged, noted, submit, parts))

    def _begin_runs(
        self, staged: S, noted: list[Transfer], submit: Submit, parts: Iterable[Part]
    ) -> None:
        assert staged.slot is not None
        for run in runs_of(parts):
            operation = submit(*run.source, staged.slot[run.place])
            label = f"subgroup {staged.subgroup.index} {run.names}"
            noted.append(self._timeline.watch(operation, label, purpose=run.purposes))


def are_done(operations: Iterable[Transfer]) -> bool:
    """Asked of every subgroup on its way, again and again."""
    for operation in operations:  # noqa: SIM110
        if not operation.done():
            return False
    return True


def _has_ended(operation: Transfer) -> bool:
    """Wait for a transfer whose outcome no longer matters: its failure has been, or will be,
    reported by another. False where nobody knows, as a device cannot be waited for.
    """
    try:
        operation.result()
    except AioError:
        return True
    except Exception:  # of a device, which may be at it still
        return False
    return True
