"""The update of the optimizer in simulated time, after ``swap.update``.

A pass walks the subgroups: reads for as many as there are slots, the kernel on the oldest, writes
behind it. It may begin early, in the backward pass, and holds then what it has written until the
step is taken. In the replay steps are always taken as they were proposed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

from simulator.clock import Process, Signal
from simulator.gradients import Gradients
from simulator.machine import Machine
from simulator.weights import Weights
from swap.plan.layout import PIECE, Subgroup
from swap.plan.placement import Placement, planes_of
from swap.plan.rules import UpdateRule
from swap.tiers import Tier
from swap.update.pipeline import parts_of


@dataclass(slots=True, eq=False)
class _Job:
    subgroup: Subgroup
    has_slot: bool
    offered: bool = False
    reads: list[Signal] = field(default_factory=list)
    writes: list[Signal] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Pass:
    ahead: deque[Subgroup]
    is_confirmed: bool
    reading: deque[_Job] = field(default_factory=deque)
    writing: deque[_Job] = field(default_factory=deque)
    held: deque[_Job] = field(default_factory=deque)


class Update:
    """Runs passes one at a time. ``changed`` is set, and replaced, whenever waiting may end."""

    def __init__(
        self,
        machine: Machine,
        placement: Placement,
        rule: UpdateRule,
        weights: Weights,
        gradients: Gradients,
    ) -> None:
        self._machine = machine
        self._state_home = placement.state_home
        self._weights = weights
        self._gradients = gradients
        self._free_slots = placement.num_slots
        self._current: _Pass | None = None
        self._changed = Signal(machine.clock)
        groups = placement.layout.subgroups
        self._state_bytes = [
            [plane.nbytes(group.numel) for plane in planes_of(group, rule)[1:]] for group in groups
        ]

    @property
    def is_idle(self) -> bool:
        return self._current is None

    def submit(self, subgroups: Sequence[Subgroup]) -> None:
        """Start a step; the one before must have been waited for."""
        self._weights.begin_update(parts_of(subgroups))
        work = _Pass(deque(), is_confirmed=True)
        self._add(work, subgroups)
        self._begin(work)

    def begin_early(self) -> None:
        self._begin(_Pass(deque(), is_confirmed=False))

    def feed(self, subgroups: Iterable[Subgroup]) -> None:
        assert self._current is not None
        self._add(self._current, subgroups)
        self._notify()

    def confirm(self, fed: Sequence[Subgroup], rest: Sequence[Subgroup]) -> None:
        """The step is taken as proposed for ``fed``: publish that, then do ``rest``."""
        assert self._current is not None
        self._weights.begin_update(parts_of([*fed, *rest]))
        self._add(self._current, rest)
        self._current.is_confirmed = True
        self._notify()

    def wait(self) -> Process:
        while self._current is not None:
            yield self._changed

    def update_now(self, subgroups: Sequence[Subgroup]) -> Process:
        """Those that are always in host memory, before ``step`` returns."""
        for group in subgroups:
            yield from self._machine.kernel(_elements(group), f"subgroup {group.index}")
            for segment in group.segments:
                self._weights.published(segment.parameter, group.index)

    def _begin(self, work: _Pass) -> None:
        assert self._current is None
        self._current = work
        self._machine.clock.start(self._run(work))

    def _run(self, work: _Pass) -> Process:
        while (yield from self._has_work(work)):
            while work.is_confirmed and work.held:
                yield from self._publish(work.held.popleft())
            yield from self._start_reads(work)
            if work.reading:
                yield from self._advance(work)
            yield from self._finish_written(work, wait=not work.reading)
        self._current = None
        self._notify()

    def _has_work(self, work: _Pass) -> Generator[Signal, None, bool]:
        while not (work.ahead or work.reading or work.writing):
            if work.is_confirmed:
                return bool(work.held)
            yield self._changed
        return True

    def _add(self, work: _Pass, subgroups: Iterable[Subgroup]) -> None:
        """What the next forward pass wants first is updated first."""
        work.ahead = deque(sorted([*work.ahead, *subgroups], key=self._first_use))

    def _first_use(self, group: Subgroup) -> tuple[int, int]:
        uses = (self._weights.schedule.first_use(part.parameter) for part in group.segments)
        return min(uses), group.index

    def _start_reads(self, work: _Pass) -> Process:
        while work.ahead and self._has_slot(work):
            group = work.ahead.popleft()
            job = _Job(group, has_slot=self._needs_slot(group))
            self._free_slots -= job.has_slot
            yield from self._start_read(job)
            work.reading.append(job)

    def _has_slot(self, work: _Pass) -> bool:
        if self._free_slots or not self._needs_slot(work.ahead[0]):
            return True
        for job in work.held:
            if job.has_slot:
                self._free(job)
                return True
        return False

    def _needs_slot(self, group: Subgroup) -> bool:
        return self._on_nvme(group) or self._gradients.is_spilled(group)

    def _on_nvme(self, group: Subgroup) -> bool:
        return self._state_home[group.index] is Tier.NVME

    def _start_read(self, job: _Job) -> Process:
        group = job.subgroup
        if self._gradients.is_spilled(group):
            yield from self._gradients.settle(group)
            job.reads.append(self._read(group, self._gradients.nbytes(group), "gradients"))
        if not self._on_nvme(group):
            return
        cached = 0
        for segment in group.segments:
            entry = self._weights.old(segment)
            if entry is not None:
                yield entry.arrived
                self._weights.took_old(segment)
                cached += -(-max(1, segment.length) // PIECE) * PIECE
        missing = (group.numel - cached) * group.dtype.itemsize
        if missing > 0:
            job.reads.append(self._read(group, missing, "weights"))
        for nbytes in self._state_bytes[group.index]:
            job.reads.append(self._read(group, nbytes, "state"))

    def _read(self, group: Subgroup, nbytes: int, purpose: str) -> Signal:
        label = f"subgroup {group.index}"
        return self._machine.read(nbytes, urgent=False, purpose=purpose, label=label)

    def _advance(self, work: _Pass) -> Process:
        arrived = (job for job in work.reading if all(read.is_set for read in job.reads))
        job = next(arrived, work.reading[0])
        group = job.subgroup
        yield from job.reads
        yield from self._machine.kernel(_elements(group), f"subgroup {group.index}")
        if work.is_confirmed:
            self._offer(job)
        if self._on_nvme(group):
            weights = group.numel * group.dtype.itemsize
            for nbytes, purpose in [
                (weights, "weights"),
                *((nbytes, "state") for nbytes in self._state_bytes[group.index]),
            ]:
                label = f"subgroup {group.index}"
                job.writes.append(self._machine.write(nbytes, purpose=purpose, label=label))
        work.reading.remove(job)
        work.writing.append(job)

    def _finish_written(self, work: _Pass, *, wait: bool) -> Process:
        finished = [job for job in work.writing if all(write.is_set for write in job.writes)]
        if wait and not finished:
            finished = list(work.writing)[:1]
        for job in finished:
            if work.is_confirmed:
                yield from self._publish(job)
            else:
                yield from job.writes
                work.held.append(job)
            work.writing.remove(job)

    def _publish(self, job: _Job) -> Process:
        yield from job.writes
        self._offer(job)
        self._gradients.release(job.subgroup)
        for segment in job.subgroup.segments:
            self._weights.published(segment.parameter, job.subgroup.index)
        self._free(job)

    def _offer(self, job: _Job) -> None:
        """Pass new weights on to the arena, if they are still in a slot (or at home)."""
        if job.offered or not (job.has_slot or not self._on_nvme(job.subgroup)):
            return
        job.offered = True
        for segment in job.subgroup.segments:
            self._weights.offer(segment)

    def _free(self, job: _Job) -> None:
        self._free_slots += job.has_slot
        job.has_slot = False

    def _notify(self) -> None:
        changed, self._changed = self._changed, Signal(self._machine.clock)
        changed.set()


def _elements(group: Subgroup) -> int:
    return sum(segment.length for segment in group.segments)
