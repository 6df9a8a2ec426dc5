"""Who runs a backward or a forward pass, also after an interrupt came to it."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from infinity.autograd.phases import Phases
from infinity.backward_passes import BackwardPasses
from swap.marks import DeviceMarks
from swap.timeline import Timeline
from tests.support.fake_events import FakeDevice
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
    phases = Phases(timeline, torch.device("cpu"))
    phases.forward_begins()
    phases.forward_begins()
    phases.forward_ends()
    assert forwards(timeline) == 1


def test_forward_passes_that_overlap_are_recorded_as_one() -> None:
    timeline = Timeline()
    phases = Phases(timeline, torch.device("cpu"))
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


def test_phases_on_a_device_last_as_long_as_it_computes() -> None:
    timeline, device = Timeline(), FakeDevice()
    marks = DeviceMarks(device.event, lambda: device)
    phases = Phases(timeline, torch.device("cuda", 0), lambda _: marks)
    for _ in range(2):
        phases.forward_begins()
        device.give(2.0)
        phases.forward_ends()
        device.give(0.25)  # the loss
        phases.backward_works()
        for _ in range(3):
            device.give(1.0)
            phases.backward_works()
        device.give(8.0)  # no part of the backward pass
        phases.end_backward()
    assert timeline.events() == []
    assert device.num_waits == 1  # for the first mark of all, and never for a pass
    device.run()
    found = [(event.kind, round(event.stop - event.start, 5)) for event in timeline.events()]
    assert found == [("forward", 2.0), ("backward", 3.0)] * 2
