"""Updates on a device that fails, in its copies, waits and questions: the processors do them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from swap.device.interface import Stream
from swap.device.visits import Pace
from swap.interruptions.mixture import MixedStateError
from swap.plan.spares import NUM_VISITS
from swap.update.pipeline import UpdatePipeline
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import (
    RULE,
    TieredRig,
    assert_same,
    fill_both,
    step_both,
    wait_until_stopped_ahead,
)
from tests.support.visiting import ALL, End, Refusing, backward, made


@pytest.fixture(autouse=True)
def all_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_sooner_there", lambda *_: True)


def trained(stack: ExitStack, folder: Path, *, is_speculative: bool = True) -> TieredRig:
    """Behind a step, from which the next one is expected."""
    rig = made(stack, folder, SimulatedDevice(), is_speculative=is_speculative)
    backward(rig, 1)
    step_both(rig.state, rig.plain, ALL)
    rig.state.flush()
    return rig


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
    rig = trained(stack, tmp_path)
    visits: Any = rig.state.visits
    device = visits._device
    visits._device = refusing = Refusing(device, (kind, Stream.BACK), 1, 1 << 30)
    backward(rig, 2)
    rig.state.collect_gradients()
    assert refusing.has_failed.wait(20.0)
    if kind == "wait":  # without its spare block it is no more updated ahead
        wait_until_stopped_ahead(rig.state)
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
    rig = trained(stack, tmp_path)
    visits: Any = rig.state.visits
    device = visits._device
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
    rig = trained(stack, tmp_path, is_speculative=is_speculative)
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
    rig = trained(stack, tmp_path, is_speculative=is_speculative)
    for name in ("apply", "apply_aside", "apply_on_device"):
        monkeypatch.setattr(type(RULE), name, raising(name))
    backward(rig, 2)
    rig.state.step(rig.plain.updates(ALL), 1.0)
    with pytest.raises(MixedStateError, match=r"the optimizer raised .*apply.* as it updated p"):
        rig.state.flush()
    assert "in host memory any more" not in caplog.text


def test_a_slot_comes_back_of_a_visit_that_the_rule_has_stopped(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each load behind it: after as many as there are slots no visit began."""
    rig = trained(stack, tmp_path, is_speculative=False)
    for number in range(2, 2 + NUM_VISITS):
        with monkeypatch.context() as patch:
            for name in ("apply", "apply_aside", "apply_on_device"):
                patch.setattr(type(RULE), name, raising(name))
            backward(rig, number)
            rig.state.step(rig.plain.updates(ALL), 1.0)
            with pytest.raises(MixedStateError):
                rig.state.flush()
        rig.state.discard_step()
        rig.state.mixture.stopped = ()
        rig.plain.gradients.clear()
        fill_both(rig.state, rig.plain)
    visits: Any = rig.state.visits
    assert visits.can_begin(1)
    assert len(visits._free) == NUM_VISITS


def raising(message: str) -> Callable[..., None]:
    def apply(*_: Any) -> None:
        raise RuntimeError(message)

    return apply
