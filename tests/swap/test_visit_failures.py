"""Updates on a device that fails, in its copies, waits and questions: the processors do them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from swap.device.interface import Stream
from swap.device.visits import Pace, Visits
from swap.interruptions.mixture import MixedStateError
from swap.update.pipeline import UpdatePipeline
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import RULE, assert_same, step_both
from tests.support.visiting import ALL, End, Refusing, backward, made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of visits that were begun."""
    noted: list[int] = []
    begin = Visits.begin

    def begin_and_note(visits: Visits, visit: Any, *rest: Any) -> None:
        noted.append(visit.elements)
        begin(visits, visit, *rest)

    monkeypatch.setattr(Visits, "begin", begin_and_note)
    return noted


@pytest.fixture(autouse=True)
def all_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_sooner_there", lambda *_: True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_speculative", [True, False])
@pytest.mark.parametrize("times", [1, 1 << 30])
@pytest.mark.parametrize("stream", [Stream.UP, Stream.BACK])
@pytest.mark.parametrize("kind", ["copy", "wait", "ask"])
@pytest.mark.parametrize("first", matrix([1, 2, 7], usual=[2]))
def test_processors_do_what_a_device_fails_to(
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    begun: list[int],
    is_speculative: bool,
    times: int,
    kind: str,
    stream: Stream,
    first: int,
) -> None:
    device = SimulatedDevice()
    rig = made(stack, tmp_path, device, is_speculative=is_speculative)
    for number in range(1, 3):
        backward(rig, number)
        step_both(rig.state, rig.plain, ALL)
        rig.state.flush()
    visits: Any = rig.state.visits
    refusing = visits._device = Refusing(device, (kind, stream), first, times)
    for number in range(3, 6):
        backward(rig, number)
        step_both(rig.state, rig.plain, ALL)
        assert_same(rig.state, rig.plain)
    has_failed = refusing.num_calls >= first
    assert has_failed or (kind, stream) != ("copy", stream)
    assert caplog.text.count("updates nothing of what is in host memory any more") == has_failed
    begun.clear()
    visits._device = device
    backward(rig, 6)
    step_both(rig.state, rig.plain, ALL)
    assert_same(rig.state, rig.plain)
    assert bool(begun) is not has_failed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["copy", "wait"])
def test_what_a_device_fails_with_for_a_step_that_is_not_taken_changes_nothing(
    stack: ExitStack, tmp_path: Path, kind: str
) -> None:
    device = SimulatedDevice()
    rig = made(stack, tmp_path, device)
    backward(rig, 1)
    step_both(rig.state, rig.plain, ALL)
    rig.state.flush()
    visits: Any = rig.state.visits
    visits._device = refusing = Refusing(device, (kind, Stream.BACK), 1, 1 << 30)
    backward(rig, 2)
    rig.state.collect_gradients()
    deadline = time.monotonic() + 20.0
    while not refusing.num_calls or (rig.state.pipeline._current is not None and kind == "wait"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    step_both(rig.state, rig.plain, ALL, lr=3e-3)
    assert_same(rig.state, rig.plain)
    visits._device = device


class Held(Refusing):
    """Its waits for copies back to host memory begin, and fail when they are let ``go``."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device, ("none", Stream.BACK), 1, 1)
        self.is_waited_for, self.go = threading.Event(), threading.Event()

    def count(self, *kind: Any) -> None:
        if kind == ("wait", Stream.BACK):
            self.is_waited_for.set()
            assert self.go.wait(20.0)
            raise RuntimeError("the device failed")


class HeldEnd(End):
    def done(self) -> bool:
        return self.event.stream is not Stream.BACK


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_device_that_fails_as_the_step_is_taken_stops_no_step(
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_late: bool,
) -> None:
    """Taken while the device is waited for, or when the failure is on its way to be handled."""
    device = SimulatedDevice()
    rig = made(stack, tmp_path, device)
    backward(rig, 1)
    step_both(rig.state, rig.plain, ALL)
    rig.state.flush()
    visits: Any = rig.state.visits
    visits._device = held = Held(device)
    monkeypatch.setattr(held, "record", lambda stream: HeldEnd(held, device.record(stream)))
    is_stopped, is_taken = threading.Event(), threading.Event()
    stop = UpdatePipeline._stop

    def stop_later(pipeline: UpdatePipeline, *rest: Any) -> None:
        is_stopped.set()
        assert is_taken.wait(20.0)
        stop(pipeline, *rest)

    monkeypatch.setattr(UpdatePipeline, "_stop", stop_later)
    backward(rig, 2)
    rig.state.collect_gradients()
    assert held.is_waited_for.wait(20.0)
    if is_late:
        held.go.set()
        assert is_stopped.wait(20.0)
    step_both(rig.state, rig.plain, ALL)
    held.go.set()
    is_taken.set()
    visits._device = device
    assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("is_speculative", [True, False])
def test_processors_do_what_fails_as_it_is_computed_on_a_device(
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_speculative: bool,
) -> None:
    """Such as for want of memory, which a program has taken."""
    rig = made(stack, tmp_path, SimulatedDevice(), is_speculative=is_speculative)
    backward(rig, 1)
    step_both(rig.state, rig.plain, ALL)
    rig.state.flush()
    monkeypatch.setattr(type(RULE), "apply_on_device", raising("out of memory"))
    for number in range(2, 4):
        backward(rig, number)
        step_both(rig.state, rig.plain, ALL)
        assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("is_speculative", [True, False])
def test_what_a_rule_raises_everywhere_is_told_as_of_the_processors(
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_speculative: bool,
) -> None:
    rig = made(stack, tmp_path, SimulatedDevice(), is_speculative=is_speculative)
    backward(rig, 1)
    step_both(rig.state, rig.plain, ALL)
    rig.state.flush()
    for name in ("apply", "apply_aside", "apply_on_device"):
        monkeypatch.setattr(type(RULE), name, raising(name))
    backward(rig, 2)
    rig.state.step(rig.plain.updates(ALL), 1.0)
    with pytest.raises(MixedStateError, match=r"the optimizer raised .*apply.* as it updated p"):
        rig.state.flush()
    assert "in host memory any more" not in caplog.text


def raising(message: str) -> Callable[..., None]:
    def apply(*_: Any) -> None:
        raise RuntimeError(message)

    return apply
