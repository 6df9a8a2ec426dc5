"""In which order an update is done, and what it does not wait for: the pipeline over stages that do
nothing but note what they were told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from swap.interruptions.undo import Undo
from swap.plan.layout import PIECE, Subgroup, pack
from swap.plan.schedule import Schedule
from swap.update.passes import Pass
from swap.update.pipeline import UpdatePipeline
from swap.update.stages import Job, Step
from tests.support.tiers import specs_of

STEP = Step(updates={}, gradient_scale=1.0)
TIMEOUT = 10.0


def groups(count: int, *, parts: int = 1) -> list[Subgroup]:
    """Of parameters in so many parts."""
    return list(pack(specs_of([parts * PIECE] * count), PIECE).subgroups)


class Weights:
    """What the pipeline asks of the weights; ``order`` is that of the forward pass."""

    def __init__(self, order: list[int]) -> None:
        self.schedule = Schedule()
        for parameter in order:
            self.schedule.record(parameter)
        self.schedule.end_cycle()

    def begin_update(self, *_: object) -> None: ...

    def fail(self, failure: BaseException) -> None:
        raise AssertionError("nothing fails here") from failure


class Stages:
    """Notes what begins and what is published. ``slow`` subgroups are not written before
    ``release`` is set, and what is read from ``late`` ones is not there; nothing is read before
    ``opened`` is. Subgroups ``in_memory`` need no slot. Weights of ``copied`` ones are passed on to
    a device, which has them when ``release`` is set. Those ``visiting`` are updated there.
    """

    def __init__(
        self,
        slots: int,
        slow: set[int] | None = None,
        late: set[int] | None = None,
        in_memory: set[int] | None = None,
        copied: set[int] | None = None,
        visiting: set[int] | None = None,
    ) -> None:
        self.log: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.release = threading.Event()
        self.opened = threading.Event()
        self._slow, self._late = slow or set(), late or set()
        self._in_memory = in_memory or set()
        self._copied = copied or set()
        self._visiting = visiting or set()
        self._free = slots
        self._written: list[Job] = []

    def note(self, what: str, group: Subgroup) -> None:
        with self.changed:
            self.log.append((what, group.index))
            self.changed.notify_all()

    def wait_for(self, is_enough: Callable[[list[tuple[str, int]]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: is_enough(self.log), TIMEOUT), self.log

    def of(self, what: str) -> list[int]:
        return [index for kind, index in self.log if kind == what]

    def needs_slot(self, group: Subgroup) -> bool:
        return group.index not in self._in_memory

    def can_start(self, group: Subgroup) -> bool:
        return self._free > 0 or not self.needs_slot(group)

    def start_read(
        self, step: Step, group: Subgroup, *, is_ahead: bool, is_aside: bool = False
    ) -> Job:
        assert self.opened.wait(TIMEOUT)
        self._free -= self.needs_slot(group)
        self.note("read", group)
        return Job(group, step=step, is_aside=is_aside or is_ahead, is_ahead=is_ahead)

    def is_sooner_on_device(self, waiting: Sequence[Subgroup], *, is_ahead: bool) -> bool:
        assert not is_ahead
        return waiting[-1].index in self._visiting

    def start_visit(self, job: Job) -> None:
        self.note("visit", job.subgroup)

    def is_read(self, job: Job) -> bool:
        return job.subgroup.index not in self._late or self.release.is_set()

    def run_kernel(self, job: Job) -> None:
        if job.subgroup.index in self._late:
            assert self.release.wait(TIMEOUT)
        self.note("kernel", job.subgroup)

    def insert_weights(self, job: Job) -> None:
        if job.subgroup.index in self._copied:
            self._slow.add(job.subgroup.index)

    def start_write(self, job: Job) -> None: ...

    def is_written(self, job: Job) -> bool:
        return job.subgroup.index not in self._slow or self.release.is_set()

    def finish_write(self, job: Job) -> None:
        if job.subgroup.index in self._slow:
            assert self.release.wait(TIMEOUT)
        if job not in self._written:  # held or not, it needs its slot no more
            self._written.append(job)
            self._free += self.needs_slot(job.subgroup)

    def waits_for_device(self, job: Job) -> bool:
        return job.subgroup.index in self._copied and not self.release.is_set()

    def release_slot(self, job: Job) -> None: ...

    def publish(self, job: Job) -> None:
        self.finish_write(job)
        self.note("published", job.subgroup)

    def abandon(self, job: Job) -> None: ...


@pytest.fixture
def run() -> Any:
    """Makes pipelines, and closes them."""
    made: list[UpdatePipeline] = []

    def make(stages: Stages, order: list[int]) -> UpdatePipeline:
        made.append(UpdatePipeline(stages, Weights(order), Undo()))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


def test_a_step_goes_in_the_order_of_the_next_forward_pass(run: Any) -> None:
    stages, all_groups = Stages(slots=1), groups(4)
    stages.opened.set()
    run(stages, [2, 0, 3, 1]).submit(STEP, all_groups)
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 4)
    assert stages.of("read") == [2, 0, 3, 1]


def test_of_what_the_backward_pass_has_completed_the_first_layer_comes_next(run: Any) -> None:
    stages, all_groups = Stages(slots=1), groups(6)
    pipeline = run(stages, list(range(6)))
    pipeline.speculate(STEP)
    for group in reversed(all_groups[1:]):
        pipeline.feed([group])
        if group.index == 5:  # this one is being read while the others come
            stages.opened.set()
            stages.wait_for(lambda log: ("read", 5) in log)
            stages.opened.clear()
    assert pipeline.validate(STEP, all_groups[1:], all_groups[:1])
    stages.opened.set()
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 6)
    begun = stages.of("read")
    assert begun[0] == 5
    # One more may have been chosen before the others came.
    assert begun[2:] == sorted(begun[2:])
    assert sorted(begun) == list(range(6))


def test_a_parameter_that_is_begun_is_finished_before_an_earlier_one_of_the_model(run: Any) -> None:
    stages, all_groups = Stages(slots=1, late={4}), groups(2, parts=4)
    pipeline = run(stages, [0, 1])
    stages.opened.set()
    pipeline.speculate(STEP)
    pipeline.feed(all_groups[4:])
    stages.wait_for(lambda log: ("read", 4) in log)
    pipeline.feed(all_groups[:4])
    stages.release.set()
    stages.wait_for(lambda log: sum(kind == "kernel" for kind, _ in log) == 8)
    assert stages.of("read") == [4, 5, 6, 7, 0, 1, 2, 3]
    assert pipeline.validate(STEP, all_groups, [])
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 8)
    assert stages.of("published") == list(range(8))


@pytest.mark.parametrize("in_memory", [{0}, set[int]()])
def test_what_cannot_begin_is_not_lost_among_what_is_added_meanwhile(
    run: Any, in_memory: set[int]
) -> None:
    """As a step is taken while the pass ahead of it meets an error, the step has all of them."""
    stages, (one, other) = Stages(slots=1, in_memory=in_memory), groups(2)
    pipeline = run(stages, [0, 1])
    work = Pass(STEP, is_validated=True, is_complete=True)
    pipeline._add(work, [one])
    is_adding = threading.Event()
    failures: list[OSError] = []

    def fail(*_: object, **__: object) -> Job:
        assert is_adding.wait(TIMEOUT)
        raise OSError

    def start() -> None:
        try:
            pipeline._start_reads(work)
            pipeline._start_in_memory(work)
        except OSError as failure:
            failures.append(failure)

    def first_use(group: Subgroup) -> tuple[int, int]:
        is_adding.set()
        thread.join(0.2)
        return group.index, group.index

    stages.start_read = fail  # type: ignore[method-assign]
    thread = threading.Thread(target=start)
    thread.start()
    while work.waiting:
        thread.join(0.001)
    with pipeline._lock:
        work.add([other], first_use, stages.needs_slot)
    thread.join(TIMEOUT)
    assert failures
    assert sorted(group.index for group in work.waiting) == [0, 1]


def test_what_is_at_home_in_memory_is_not_kept_waiting_by_a_slow_ssd(run: Any) -> None:
    stages, all_groups = Stages(slots=8, slow={0, 2}), groups(5)
    stages.opened.set()
    run(stages, list(range(5))).submit(STEP, all_groups)
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) >= 3)
    assert sorted(stages.of("published")) == [1, 3, 4]
    stages.release.set()
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 5)


def test_reads_begin_before_what_is_in_memory_is_updated(run: Any) -> None:
    stages, all_groups = Stages(slots=2, late={3, 4}, in_memory={0, 1, 2}), groups(5)
    stages.opened.set()
    run(stages, list(range(5))).submit(STEP, all_groups)
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 3)
    assert stages.of("read")[:2] == [3, 4]
    assert stages.of("kernel") == [0, 1, 2]
    stages.release.set()
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 5)


def test_what_has_been_read_is_updated_before_what_is_in_memory(run: Any) -> None:
    stages, all_groups = Stages(slots=1, in_memory={0, 1}), groups(4)
    stages.opened.set()
    run(stages, list(range(4))).submit(STEP, all_groups)
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 4)
    assert stages.of("kernel")[0] == 2
    assert sorted(stages.of("kernel")) == list(range(4))


def test_nothing_waits_for_a_device_that_is_behind_with_copies_of_what_was_held(run: Any) -> None:
    stages, all_groups = Stages(slots=8, copied={0}), groups(5)
    pipeline = run(stages, list(range(5)))
    pipeline.speculate(STEP)
    stages.opened.set()
    pipeline.feed(all_groups[:3])
    stages.wait_for(lambda log: sum(kind == "kernel" for kind, _ in log) == 3)
    assert pipeline.validate(STEP, all_groups[:3], all_groups[3:])
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 4)
    assert sorted(stages.of("published")) == [1, 2, 3, 4]
    stages.release.set()
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 5)


def test_processors_go_on_while_a_device_has_some_of_what_is_in_memory(run: Any) -> None:
    everything = set(range(5))
    stages = Stages(slots=1, in_memory=everything, visiting={1, 3, 4}, slow={3, 4})
    stages.opened.set()
    run(stages, [*everything]).submit(STEP, groups(5))
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 3)
    assert stages.of("visit") == [4, 3], "what is wanted last"
    assert stages.of("kernel") == [0, 1, 2]
    assert sorted(stages.of("published")) == [0, 1, 2]
    stages.release.set()
    stages.wait_for(lambda log: sum(kind == "published" for kind, _ in log) == 5)


def test_nothing_is_begun_ahead_of_a_step_once_the_pipeline_closes(run: Any) -> None:
    """As where the last gradient arrives while the block ends: nobody would take it."""
    pipeline = run(Stages(slots=1), [0])
    pipeline.close()
    pipeline.speculate(STEP)
    pipeline.feed(groups(1))
    again = threading.Thread(target=pipeline.close, daemon=True)
    again.start()
    again.join(TIMEOUT)
    assert not again.is_alive()
