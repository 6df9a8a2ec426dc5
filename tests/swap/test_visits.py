"""Updates on a device of what is at home in host memory: the same bits, in order, and sooner."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swap.device.interface import Stream
from swap.device.visits import Pace
from tests.support.proof import matrix
from tests.support.simulated_device import OrderError, SimulatedDevice
from tests.support.simulated_device.faults import WithoutWaits
from tests.support.tiers import assert_same, fill_both, same_bits, step_both
from tests.support.visiting import ALL, SIZES, backward, made


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Decides in place of what was measured whether the next one visits the device."""

    def set_choice(choice: Callable[[], bool]) -> None:
        monkeypatch.setattr(Pace, "is_sooner_there", lambda *_: choice())

    return set_choice


@pytest.mark.parametrize("is_speculative", [True, False])
@pytest.mark.parametrize("make", [SimulatedDevice, partial(SimulatedDevice, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_visits_have_the_bits_of_the_processors(
    stack: ExitStack,
    tmp_path: Path,
    begun: list[int],
    choose: Callable[[Callable[[], bool]], None],
    dtype: torch.dtype,
    make: Callable[[], SimulatedDevice],
    is_speculative: bool,
) -> None:
    choose(lambda: True)
    device = make()
    rig = made(stack, tmp_path, device, dtype=dtype, is_speculative=is_speculative)
    for number in range(1, 5):
        backward(rig, number)
        step_both(rig.state, rig.plain, ALL)
        assert_same(rig.state, rig.plain)
    assert begun, "visits are made"
    device.check()


@pytest.mark.parametrize("seed", matrix(range(40), usual=range(8)))
def test_programs_have_the_bits_of_plain_training_whatever_visits(
    stack: ExitStack,
    tmp_path: Path,
    choose: Callable[[Callable[[], bool]], None],
    seed: int,
) -> None:
    """Steps other than expected, of some parameters, cleared gradients, values that are set."""
    chance = random.Random(seed)
    choose(lambda: chance.random() < 0.6)
    device = SimulatedDevice(seed)
    rig = made(stack, tmp_path, device, is_speculative=chance.random() < 0.8)
    for number in range(1, 9):
        backward(rig, number)
        match chance.choice(("step", "step", "scale", "lr", "some", "more", "clear", "set")):
            case "step":
                step_both(rig.state, rig.plain, ALL)
            case "scale":
                step_both(rig.state, rig.plain, ALL, scale=0.5)
            case "lr":
                step_both(rig.state, rig.plain, ALL, lr=3e-3)
            case "some":
                rig.state.clear_gradients(1)
                rig.plain.gradients.pop(1)
                step_both(rig.state, rig.plain, [0, 2, 3, 4, 5])
            case "more":
                backward(rig, number + 100, [chance.randrange(len(SIZES))])
                step_both(rig.state, rig.plain, ALL)
            case "clear":
                rig.state.clear_gradients()
                rig.plain.gradients.clear()
            case "set":
                step_both(rig.state, rig.plain, ALL)
                rig.state.flush()
                fill_both(rig.state, rig.plain, seed=number)
        for parameter in ALL:
            (weight,) = rig.state.weights.acquire([parameter], "test")
            assert same_bits(weight, rig.plain.weight(parameter))
            del weight
            rig.state.weights.release("test")
    assert_same(rig.state, rig.plain)
    device.check()


@pytest.mark.parametrize("slow", range(4))
def test_a_link_is_as_fast_as_it_was_when_nothing_held_up_its_measurement(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """What is measured counts until the block ends, and no update visits over a slow link."""
    now = [0.0]

    class Timed(SimulatedDevice):
        def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
            is_slow = self.num_copies // 2 == slow
            super().copy(stream, target, source)
            now[0] += target.nbytes * (100.0 if is_slow else 1.0)

    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: now[0])
        patch.setattr("swap.device.visits.time", clock)
        visits: Any = made(stack, tmp_path, Timed()).state.visits
    assert visits.pace._link == 1.0


class UpdatedBeforeCome(WithoutWaits):
    """Values are updated before they have come."""

    waiting, awaited = Stream.UPDATE, Stream.UP


class BackBeforeUpdated(WithoutWaits):
    """Values go back before they are updated."""

    waiting, awaited = Stream.BACK, Stream.UPDATE


class BackTakenEarly(SimulatedDevice):
    """Values are taken for home before they have come there."""

    def is_done(self, event: Any) -> bool:
        return event.stream is Stream.BACK or super().is_done(event)

    def wait(self, event: Any) -> None:
        if event.stream is not Stream.BACK:
            super().wait(event)


@pytest.mark.parametrize("fault", [UpdatedBeforeCome, BackBeforeUpdated, BackTakenEarly])
def test_order_that_is_not_asked_for_is_found(
    tmp_path: Path, choose: Callable[[Callable[[], bool]], None], fault: type[SimulatedDevice]
) -> None:
    choose(lambda: True)
    with pytest.raises((OrderError, AssertionError)):
        _train(tmp_path, fault())


def _train(folder: Path, device: SimulatedDevice) -> None:
    with ExitStack() as stack:
        rig = made(stack, folder, device)
        for number in range(1, 4):
            backward(rig, number)
            step_both(rig.state, rig.plain, ALL)
            assert_same(rig.state, rig.plain)
        device.check()


def test_so_many_visit_that_link_and_processors_end_at_once() -> None:
    def part(link: float, here: float, nbytes: int = 14, weight: int = 2) -> float:
        """Of 1000 subgroups of 100 elements, each of 14 bytes on its way up."""
        pace, visited = Pace(link), 0
        for _ in range(1000 - 1):
            if pace.is_sooner_there(100, 100 * nbytes, 100_000):
                pace.went_there(100)
                visited += 1
            else:
                pace.took_here(100, 100 * nbytes, 100 * weight, 100 * here)
        return visited / 1000

    each = 14.0  # a second for each byte
    assert part(1.0, 0.1 * each) == 0, "the link is slower than it takes to wait for it"
    assert part(1.0, each) == pytest.approx((1 - 4 / 14) / 2, abs=0.01)
    assert part(1.0, 4 * each) == pytest.approx((4 - 4 / 14) / 5, abs=0.01)
    assert part(1.0, 16.0, nbytes=16, weight=4) == pytest.approx(0.25, abs=0.01), "float32"
    assert part(1.0, 7.9, nbytes=16, weight=4) == 0, "its weights take the link as long"
    assert part(1.0, 8.0, nbytes=8) == pytest.approx(0.25, abs=0.01), "moments of 8 bits"
    assert part(0.0, each) == pytest.approx(0.8, abs=0.11), "never all: rates change"


def test_the_last_ones_are_not_waited_for_on_a_device() -> None:
    pace = Pace(1.0)
    assert not pace.is_sooner_there(100, 1400, 10_000), "nothing is known"
    for _ in range(10):
        pace.took_here(100, 1400, 200, 2800.0)
    assert pace.is_sooner_there(100, 1400, 100)
    assert not pace.is_sooner_there(100, 1400, 99)
