"""The stages that one subgroup goes through in an update: read, kernel, write-back, publish.

Nothing here decides an order or waits for another subgroup; ``update`` does. A job's new extents
are published only when every one of its writes is complete, so until then the subgroup is what it
was before the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from aio import AioError, Operation
from swap.cache.weight_cache import WeightCache
from swap.gradients.store import GradientStore
from swap.plan.layout import PIECE, Segment, Subgroup
from swap.plan.rules import ParameterUpdate, UpdateRule
from swap.storage.components import ComponentStore, as_bytes, as_tensor, clear_values
from swap.storage.extents import Extent, ExtentStore
from swap.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All that an update depends on, fixed when the step was taken."""

    updates: Mapping[int, ParameterUpdate]
    gradient_scale: float


@dataclass(slots=True, eq=False)
class Job:
    """One subgroup on its way through the pipeline, with the staging slot that it occupies."""

    step: Step
    subgroup: Subgroup
    offered: bool = False
    slot: np.ndarray | None = None
    components: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    reads: list[Operation] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    writes: list[Operation] = field(default_factory=list)


class Stages:
    """What to do with a job. Used by one thread."""

    def __init__(
        self,
        components: ComponentStore,
        gradients: GradientStore,
        weights: WeightCache,
        extents: ExtentStore | None,
        rule: UpdateRule,
        slots: Sequence[np.ndarray],
        timeline: Timeline,
    ) -> None:
        self._components = components
        self._gradients = gradients
        self._weights = weights
        self._extents = extents
        self._rule = rule
        self._slots = deque(slots)
        self._timeline = timeline

    def can_start(self, subgroup: Subgroup) -> bool:
        """Whether the job for ``subgroup`` needs no slot, or there is one."""
        return bool(self._slots) or not self._needs_slot(subgroup)

    def update_now(self, step: Step, subgroups: Sequence[Subgroup]) -> None:
        """Update subgroups that are in HOST with their gradients, before returning."""
        try:
            for subgroup in subgroups:
                job = self.start_read(step, subgroup)
                self.run_kernel(job)
                self.offer(job)
                self.publish(job)
        finally:
            # After an error, too: no thread must wait for an update that is not going on.
            for subgroup in subgroups:
                for segment in subgroup.segments:
                    self._weights.published(segment.parameter, subgroup.index)

    def start_read(self, step: Step, subgroup: Subgroup) -> Job:
        """Take a slot and start the reads that the kernel needs."""
        job = Job(step, subgroup)
        if self._needs_slot(subgroup):
            job.slot = self._slots.popleft()
        try:
            self._carve(job)
            self._read_gradient(job)
            if not self._components.is_host(subgroup.index):
                self._read_components(job)
        except BaseException:
            self.abandon(job)
            raise
        return job

    def is_read(self, job: Job) -> bool:
        return all(operation.done() for operation in job.reads)

    def run_kernel(self, job: Job) -> None:
        """Wait for the reads, then update every segment that has an update."""
        for operation in job.reads:
            operation.result()
        job.reads.clear()
        group = job.subgroup
        with self._timeline.span("kernel", label=f"subgroup {group.index}"):
            for segment, update in _updated(group, job.step):
                self._apply(job, segment, update, job.step.gradient_scale)

    def offer(self, job: Job) -> None:
        """Pass the new weights on to the arena, once, if the job still has them in its slot."""
        if job.offered or not job.components:
            return
        job.offered = True
        for segment, _ in _updated(job.subgroup, job.step):
            stop = segment.offset + segment.length
            self._weights.offer(segment, job.components["weight"][segment.offset : stop])

    def start_write(self, job: Job) -> None:
        """Start writing the new components to new extents; HOST components are at home already."""
        if self._components.is_host(job.subgroup.index):
            return
        assert self._extents is not None
        for name, component in job.components.items():
            data = as_bytes(component)
            extent = self._extents.allocate(data.nbytes)
            job.extents[name] = extent
            label = f"subgroup {job.subgroup.index} {name}"
            self._begin(job.writes, partial(self._extents.write, extent, 0, data), label, name)

    def is_written(self, job: Job) -> bool:
        return all(operation.done() for operation in job.writes)

    def settle(self, job: Job) -> None:
        """Wait until the new extents are written; raises ``AioError``."""
        for operation in job.writes:
            operation.result()
        job.writes.clear()

    def strip(self, job: Job) -> None:
        """Take the slot from a settled job that is held back; it can still be published."""
        self._free(job)

    def publish(self, job: Job) -> None:
        """Wait for the writes; then the new extents replace the old ones, and slot and gradients
        are free.
        """
        self.settle(job)
        self.offer(job)
        group = job.subgroup
        if job.extents:
            self._components.publish(group.index, job.extents)
            job.extents = {}
        self._gradients.release(group.index)
        for segment in group.segments:
            self._weights.published(segment.parameter, group.index)
        self._free(job)

    def abandon(self, job: Job) -> None:
        """Leave the subgroup as it was before the step: let transfers end, give back extents and
        slot.
        """
        for operation in (*job.reads, *job.writes):
            _let_end(operation)
        for extent in job.extents.values():
            assert self._extents is not None
            self._extents.release(extent)
        job.extents = {}
        self._free(job)

    def _needs_slot(self, subgroup: Subgroup) -> bool:
        index = subgroup.index
        return not (self._components.is_host(index) and self._gradients.is_host(index))

    def _free(self, job: Job) -> None:
        job.reads.clear()
        job.writes.clear()
        job.components = {}
        job.gradient = None
        if job.slot is not None:
            self._slots.append(job.slot)
            job.slot = None

    def _carve(self, job: Job) -> None:
        """Lay the staged components, and a spilled gradient after them, out in the slot; each
        starts on a page.
        """
        group, used = job.subgroup, 0
        for name in self._components.names(group.index):
            if self._components.is_host(group.index):
                job.components[name] = self._components.host(group.index, name)
                continue
            component = self._components.component(group.index, name)
            used, job.components[name] = _cut(
                job, used, component.nbytes(group.numel), component.dtype
            )
        if self._gradients.is_host(group.index):
            job.gradient = self._gradients.host(group.index)
        else:
            nbytes = group.numel * group.dtype.itemsize
            used, job.gradient = _cut(job, used, nbytes, group.dtype)

    def _read_gradient(self, job: Job) -> None:
        if not self._gradients.is_host(job.subgroup.index):
            assert job.gradient is not None
            job.reads += self._gradients.stage(job.subgroup.index, job.gradient)

    def _read_components(self, job: Job) -> None:
        for name, component in job.components.items():
            if self._components.extent(job.subgroup.index, name) is None:
                clear_values(component)
            elif name != "weight":
                self._read(job, name, 0, component.numel())
            else:
                for first, last in self._not_cached(job):
                    self._read(job, name, first, last)

    def _not_cached(self, job: Job) -> Iterator[tuple[int, int]]:
        """Element ranges of the weights that the arena could not provide, joined into runs."""
        first = last = 0
        for segment in job.subgroup.segments:
            part = job.components["weight"][segment.offset : segment.offset + segment.length]
            cached = self._weights.take_old(segment, part)
            if cached:
                if last > first:
                    yield first, last
                first = last = segment.offset + _padded(segment)
            else:
                last = segment.offset + _padded(segment)
        if last > first:
            yield first, last

    def _read(self, job: Job, name: str, first: int, last: int) -> None:
        assert self._extents is not None
        extent = self._components.extent(job.subgroup.index, name)
        assert extent is not None
        part = job.components[name][first:last]
        start = first * part.dtype.itemsize
        submit = partial(self._extents.read, extent, start, as_bytes(part), urgent=False)
        self._begin(job.reads, submit, f"subgroup {job.subgroup.index} {name}", name)

    def _begin(
        self, noted: list[Operation], submit: Callable[[], Operation], label: str, component: str
    ) -> None:
        """A transfer of the staging slot, which no other job gets while it is under way."""
        assert self._extents is not None
        self._extents.run_drained(
            lambda: noted.append(self._timeline.watch(submit(), label, purpose=_purpose(component)))
        )

    def _apply(self, job: Job, segment: Segment, update: ParameterUpdate, scale: float) -> None:
        assert job.gradient is not None
        first, length = segment.offset, segment.length
        components = {
            name: values[self._components.component(segment.subgroup, name).part(first, length)]
            for name, values in job.components.items()
        }
        gradient = job.gradient[first : first + length]
        self._rule.apply(segment, update, components, gradient, scale)


def _updated(group: Subgroup, step: Step) -> Iterator[tuple[Segment, ParameterUpdate]]:
    for segment in group.segments:
        update = step.updates.get(segment.parameter)
        if update is not None:
            yield segment, update


def _purpose(component: str) -> str:
    return "weights" if component == "weight" else "state"


def _padded(segment: Segment) -> int:
    return max(1, -(-segment.length // PIECE)) * PIECE


def _cut(job: Job, used: int, nbytes: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    assert job.slot is not None
    stop = used + nbytes
    return stop, as_tensor(job.slot[used:stop], dtype)


def _let_end(operation: Operation) -> None:
    """Wait for a transfer whose outcome no longer matters: its failure has been, or will be,
    reported by another.
    """
    try:
        operation.result()
    except AioError:
        return
