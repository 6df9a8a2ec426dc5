"""What an update of weights that are kept here is: gradients in, weights from the cache and back.

Components pass through staging slots as ``staging`` says. Beside that, a spilled gradient is staged
with them, weights that are cached are not read, and new ones are passed on to the cache. The order
of subgroups is that of ``pipeline``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch

from swap.cache.arena import Transfer
from swap.cache.weight_cache import WeightCache
from swap.device.visits import Visit, Visits
from swap.gradients.store import GradientStore
from swap.kernels import copy_values
from swap.plan.layout import Segment, Subgroup, pad
from swap.plan.rules import ParameterUpdate, UpdateRule
from swap.plan.slots import Place
from swap.storage.components import ComponentStore
from swap.storage.extents import Extent
from swap.timeline import Timeline
from swap.update.runs import Part
from swap.update.staging import Staged, Staging, are_done

_MANY = 12
"""A part of all subgroups: so many wait where processors are slower than the backward pass."""
_ENOUGH = 64
"""Subgroups: processors that have more of them waiting are behind a device in any case."""


class RuleError(Exception):
    """What a rule raised, be it an ``OSError``: that is none of ours, and what the rule has done to
    arrays in place is not done again.
    """


class VisitError(Exception):
    """A device failed with a subgroup for a step that was not taken, and has its spare block, so
    that it cannot be updated before the step is: it is as before, and can be then.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All that an update depends on, fixed when the step was taken."""

    updates: Mapping[int, ParameterUpdate]
    gradient_scale: float

    def touched(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Those with an update of a parameter."""
        return [
            group
            for group in subgroups
            if any(segment.parameter in self.updates for segment in group.segments)
        ]


@dataclass(slots=True, eq=False)
class Job(Staged):
    """One subgroup on its way through the pipeline."""

    step: Step = field(kw_only=True)
    inserted: bool = False
    is_published: bool = False
    is_ahead: bool = False
    """For a step that was not taken when it was started."""
    gradient: torch.Tensor | None = None


class Stages(Staging[Job]):
    """What to do with a job. Used by one thread."""

    def __init__(
        self,
        components: ComponentStore,
        gradients: GradientStore,
        weights: WeightCache,
        rule: UpdateRule,
        slots: deque[np.ndarray],
        timeline: Timeline,
        visits: Visits | None = None,
    ) -> None:
        super().__init__(components, slots, timeline)
        self._visits = visits
        self._gradients = gradients
        self._weights = weights
        self._rule = rule
        self._num_slots = len(slots)
        self._copies: list[Transfer] = []
        """Of new weights, out of the slot of one job."""

    def can_start(self, subgroup: Subgroup) -> bool:
        """Raises ``RuntimeError`` where no slot will be free before the device works again."""
        if super().can_start(subgroup):
            return True
        if sum(lost.slot is not None for lost in self._lost) == self._num_slots:
            raise RuntimeError(
                "the device does not tell the end of its copies any more, so that there is no "
                "memory to update in; leave the block, or, if it works again, begin anew from a "
                "checkpoint or snapshot"
            )
        return False

    def update_now(self, step: Step, subgroups: Sequence[Subgroup]) -> None:
        """Update subgroups that are arrays, with their gradients, before returning; those on a
        device are updated behind it, in front of what is computed with them.
        """
        try:
            for job in [self._updated_in_place(step, subgroup) for subgroup in subgroups]:
                self.publish(job)
        finally:
            # After an error, too: no thread must wait for an update that is not going on.
            for subgroup in subgroups:
                for segment in subgroup.segments:
                    self._weights.published(segment.parameter, subgroup.index)

    def _updated_in_place(self, step: Step, subgroup: Subgroup) -> Job:
        job = self.start_read(step, subgroup)
        self.run_kernel(job)
        return job

    def start_read(
        self, step: Step, subgroup: Subgroup, *, is_ahead: bool = False, is_aside: bool = False
    ) -> Job:
        """Take a slot and start the reads that the kernel needs. ``is_ahead``: for a step that is
        not taken yet, so that what is at home has to stay as it is; ``is_aside``: it is to, anyway.
        """
        job = Job(subgroup, step=step, is_aside=is_aside or is_ahead, is_ahead=is_ahead)
        self.start(job)
        return job

    def run_kernel(self, job: Job) -> None:
        """Wait for the reads, then update every segment that has an update."""
        self.finish_read(job)
        group = job.subgroup
        gradient = job.gradient
        assert gradient is not None
        updating = self._components.arrays.updating(group.index, gradient)
        if not job.is_aside:
            self._wait_for_copies_of(group)
        began = time.monotonic()
        with self._timeline.span("kernel", label=f"subgroup {group.index}"), updating:
            self._keep_others(job)
            for segment, update in _updated(group, job.step):
                part = gradient[segment.offset : segment.offset + segment.length]
                self._apply(job, segment, update, part)
        if self._visits is not None and self._components.arrays.on_host.has_spare(group.index):
            seconds = time.monotonic() - began
            nbytes, weights = self._bytes_of_visit(group), group.numel * group.dtype.itemsize
            self._visits.pace.took_here(group.numel, nbytes, weights, seconds)

    def is_sooner_on_device(self, waiting: deque[Subgroup], *, is_ahead: bool) -> bool:
        """Whether the step is shorter if a device updates the last of these. ``is_ahead``: there is
        a backward pass to do them in, which visits would hold up, unless they are too many for it.
        """
        group = waiting[-1]
        if self._visits is None or not self._components.arrays.on_host.has_spare(group.index):
            return False
        if is_ahead and len(waiting) * _MANY < len(self._components.layout.subgroups):
            return False
        nbytes = self._bytes_of_visit(group)
        elements = sum(one.numel for one in islice(waiting, _ENOUGH))
        is_sooner = self._visits.pace.is_sooner_there(group.numel, nbytes, elements)
        return is_sooner and self._visits.can_begin(nbytes)

    def _bytes_of_visit(self, group: Subgroup) -> int:
        """What goes to the device: its components and its gradient."""
        return self._components.nbytes(group.index) + group.numel * group.dtype.itemsize

    def start_visit(self, job: Job) -> None:
        """Have a device update a subgroup aside, of which there is nothing to read: it is written
        when its new values are in the spare block.
        """
        assert self._visits is not None
        assert job.gradient is not None
        visit = self._visits.new(job.subgroup.numel)
        job.writes.append(visit)
        home = self._components.arrays.on_host.block(job.subgroup.index)
        update = partial(self._update_on_device, job)
        try:
            self._visits.begin(visit, home, job.gradient, job.components, update)
        except Exception as failure:  # of the device, or of the rule, which raises it here, too
            self._update_here(job, failure)

    def finish_write(self, job: Job) -> None:
        """As of any subgroup; what a device has failed to bring back is updated here. Raises
        ``VisitError`` and ``RuleError`` for one that is not: nothing of it is done then.
        """
        is_away = any(isinstance(one, Visit) for one in job.writes)
        try:
            super().finish_write(job)
        except Exception as failure:
            if not is_away:
                raise
            self._update_here(job, failure)

    def _update_here(self, job: Job, failure: Exception) -> None:
        """In place of a visit that failed: what is at home is as it was."""
        assert self._visits is not None
        self.undo_write(job)
        if not self._components.arrays.on_host.has_spare(job.subgroup.index):
            if job.is_ahead:  # what is at home may not change yet
                self._visits.turn_off(failure)
                raise VisitError(str(failure)) from failure
            job.is_aside, job.components = False, {}
            self._lay_out(job)
        self.run_kernel(job)
        self._visits.turn_off(failure)  # what fails here, too, is no fault of the device

    def _update_on_device(
        self, job: Job, components: Mapping[str, torch.Tensor], gradient: torch.Tensor
    ) -> None:
        for segment, update in _updated(job.subgroup, job.step):
            part = gradient[segment.offset : segment.offset + segment.length]
            parts, scale = self._parts(segment, components), job.step.gradient_scale
            self._rule.apply_on_device(segment, update, parts, part, scale)

    def insert_weights(self, job: Job) -> None:
        """Pass the new weights on to the arena, once, if the job still has them in its slot. They
        are copied from there as they are written, behind what is computed with what they replace.

        Out of one slot at a time: a device that is behind would have all of them, and disks would
        stand still. What is not passed on now is read again when it is used.
        """
        if job.inserted or not job.components or self._components.is_array(job.subgroup.index):
            return
        job.inserted = True
        if are_done(self._copies):
            self._copies = self._insert(job, job.components["weight"])
            job.writes += self._copies

    def waits_for_device(self, job: Job) -> bool:
        """Whether its new weights are on their way there, which may take longer than writes."""
        return any(copy in job.writes and not copy.done() for copy in self._copies)

    def _insert(self, job: Job, weight: torch.Tensor) -> list[Transfer]:
        copies = []
        for segment, _ in _updated(job.subgroup, job.step):
            part = weight[segment.offset : segment.offset + segment.length]
            copy = self._weights.insert(segment, part)
            if copy is not None:
                copies.append(copy)
        return copies

    def publish(self, job: Job) -> None:
        """Wait for the writes; then the new extents replace the old ones, and slot and gradients
        are free. Nothing waits for copies of arrays, which are made of what is at home: the next
        update does. What is published stays so, also if a device refuses its weights: a second
        call does nothing.
        """
        if job.is_published:
            return
        self.insert_weights(job)
        group = job.subgroup
        if job.is_aside:
            self._wait_for_copies_of(group)
        self._weights.end_reads(group)
        super().publish(job)
        job.is_published = True
        try:
            if self._components.is_array(group.index):
                self._insert(job, self._components.arrays.of(group.index, "weight"))
        finally:
            self._gradients.release(group.index)
            for segment in group.segments:
                self._weights.published(segment.parameter, group.index)

    def _wait_for_copies_of(self, group: Subgroup) -> None:
        """Its weights at home are to change, which a device may not have copied yet."""
        if self._weights.arena is not None and self._components.is_array(group.index):
            self._weights.arena.wait_for_copies_from(
                self._components.arrays.of(group.index, "weight")
            )

    def undo_write(self, job: Job) -> None:
        """A spare block that a device may still write to is nobody's any more."""
        visits = [one for one in job.writes if isinstance(one, Visit)]
        super().undo_write(job)
        if any(visit.lost_by for visit in visits):
            self._components.arrays.on_host.lose_spare(job.subgroup.index)

    def release_slot(self, job: Job) -> None:
        super().release_slot(job)
        job.gradient = None

    def needs_slot(self, subgroup: Subgroup) -> bool:
        return super().needs_slot(subgroup) or not self._gradients.is_array(subgroup.index)

    def _lay_out(self, job: Job) -> int:
        """The gradient comes behind the components, and is read first."""
        group, used = job.subgroup, super()._lay_out(job)
        if self._gradients.is_array(group.index):
            job.gradient = self._gradients.array(group.index)
            return used
        stop = used + group.numel * group.dtype.itemsize
        job.gradient = job.lay_out(used, stop, group.dtype)
        job.reads += self._gradients.stage(group.index, job.gradient)
        return stop

    def _parts_to_read(self, job: Job, place: Place, extent: Extent) -> Iterable[Part]:
        """Of the weights, what is not cached."""
        if place.name != "weight":
            return super()._parts_to_read(job, place, extent)
        size = place.dtype.itemsize
        return [
            Part(
                place.name, extent, first * size, place.start + first * size, (last - first) * size
            )
            for first, last in self._not_cached(job)
        ]

    def _not_cached(self, job: Job) -> Iterator[tuple[int, int]]:
        """Element ranges of the weights that the arena could not provide, joined into runs."""
        first = last = 0
        for segment in job.subgroup.segments:
            part = job.components["weight"][segment.offset : segment.offset + segment.length]
            cached = self._weights.take_old(segment, part, job.reads)
            if cached:
                if last > first:
                    yield first, last
                first = last = segment.offset + pad(segment.length)
            else:
                last = segment.offset + pad(segment.length)
        if last > first:
            yield first, last

    def _apply(
        self, job: Job, segment: Segment, update: ParameterUpdate, gradient: torch.Tensor
    ) -> None:
        new, scale = self._parts(segment, job.components), job.step.gradient_scale
        index, rule = segment.subgroup, self._rule
        try:
            if self._is_beside_home(job):
                old = self._parts(segment, self._components.arrays.on_host.block(index))
                rule.apply_aside(segment, update, old, new, gradient, scale)
            elif self._components.arrays.is_on_device(index):
                rule.apply_on_device(segment, update, new, gradient, scale)
            else:
                rule.apply(segment, update, new, gradient, scale)
        except Exception as failure:  # whatever somebody's optimizer raises
            name = self._components.layout.specs[segment.parameter].name
            raise RuleError(f"the optimizer raised {failure!r} as it updated {name}") from failure

    def _keep_others(self, job: Job) -> None:
        """What has no update is in a spare block as it is at home."""
        if not self._is_beside_home(job):
            return
        home = self._components.arrays.on_host.block(job.subgroup.index)
        for segment in job.subgroup.segments:
            if segment.parameter not in job.step.updates:
                old, new = self._parts(segment, home), self._parts(segment, job.components)
                for name, values in new.items():
                    copy_values(old[name], values)

    def _parts(
        self, segment: Segment, components: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What a segment has of the components of its subgroup."""
        first, length = segment.offset, segment.length
        return {
            name: values[self._components.component(segment.subgroup, name).part(first, length)]
            for name, values in components.items()
        }


def _updated(group: Subgroup, step: Step) -> Iterator[tuple[Segment, ParameterUpdate]]:
    for segment in group.segments:
        update = step.updates.get(segment.parameter)
        if update is not None:
            yield segment, update
