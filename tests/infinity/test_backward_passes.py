"""Who runs a backward or a forward pass, also after an interrupt came to it."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from infinity.autograd.phases import Phases
from infinity.backward_passes import BackwardPasses
from swap.timeline import Timeline
from tests.support.interrupts import Lines, interrupt, interrupt_behind_call

How = Callable[[Callable[[], object], int | None], Lines]


def run_alone(passes: BackwardPasses) -> None:
    with passes.alone(sys._getframe()):
        pass


@pytest.mark.parametrize("how", [interrupt, interrupt_behind_call])
def test_interrupted_pass_keeps_no_other_thread_from_its_own(how: How) -> None:
    passes = BackwardPasses()
    kept: list[BaseException] = []

    def run() -> None:
        try:
            run_alone(passes)
        except KeyboardInterrupt as interrupted:
            kept.append(interrupted)  # its traceback keeps what was on the way, as a debugger does
            raise

    for number in range(how(run, None).seen):
        assert how(run, number).line
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run_alone, passes).result()
    assert kept


def test_passes_on_two_threads_at_once_are_refused() -> None:
    passes = BackwardPasses()
    with (
        passes.alone(sys._getframe()),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="two threads"),
    ):
        pool.submit(run_alone, passes).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_alone, passes).result()


def forwards(timeline: Timeline) -> int:
    return sum(event.kind == "forward" for event in timeline.events())


def test_forward_passes_are_recorded_after_one_that_an_interrupt_kept_from_ending() -> None:
    timeline = Timeline()
    phases = Phases(timeline)
    phases.forward_begins()
    phases.forward_begins()
    phases.forward_ends()
    assert forwards(timeline) == 1


def test_forward_passes_that_overlap_are_recorded_as_one() -> None:
    timeline = Timeline()
    phases = Phases(timeline)
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        phases.forward_begins()
        begun.set()
        go_on.wait()
        phases.forward_ends()

    phases.forward_begins()
    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    phases.forward_ends()
    assert forwards(timeline) == 0
    go_on.set()
    thread.join()
    assert forwards(timeline) == 1
