"""Values of the program that pass a link: ahead of the work on them, ordered, and never lost."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from aio import Slab
from swap.device.interface import Stream
from swap.device.link import Item, Link, Load, Place
from tests.support.simulated_device import OrderError, SimulatedDevice, SimulatedEvent
from tests.support.simulated_device.faults import (
    GradientBeforeComputed,
    GradientTakenEarly,
    LandingReleasedEarly,
    ReusedBeforeComputed,
    SlotReusedEarly,
    Unregistered,
)
from tests.support.tiers import random_values, same_bits

SLOT_BYTES, NUM_SLOTS, NUMEL = 8192, 3, 1000


class Program:
    """Weights and gradients on a device, one of each a load."""

    def __init__(self, device: SimulatedDevice, num_loads: int = 7) -> None:
        self.slab = Slab(SLOT_BYTES * NUM_SLOTS)
        self.device = device
        self.unregister = device.register(self.slab)
        self.link = Link(device, self.slab, NUM_SLOTS)
        self.weights = [random_values(number, NUMEL) for number in range(num_loads)]
        self.gradients = [random_values(100 + number, NUMEL) for number in range(num_loads)]
        self.expected = [w + g for w, g in zip(self.weights, self.gradients, strict=True)]
        self.before = [weight.clone() for weight in self.weights]

    def loads(self) -> list[Load]:
        places = Place(0, NUMEL, torch.float32), Place(NUMEL * 4, NUMEL, torch.float32)
        return [
            Load([Item(number, weight, partial(self.gradients.__getitem__, number), *places)])
            for number, weight in enumerate(self.weights)
        ]

    def work(self, load: Load) -> None:
        (item,) = load.items
        self.link.arrive(load)
        load.weight(item).add_(load.gradient(item))
        load.num_changed = 1
        self.link.leave(load)

    def pass_all(self, loads: Sequence[Load] | None = None) -> None:
        loads = self.loads() if loads is None else loads
        try:
            self.link.expect(loads)
            for load in loads:
                self.work(load)
            self.link.finish()
        except RuntimeError:
            self.link.abandon()
            raise

    def use(self) -> None:
        """The program computes with its weights."""
        for weight in self.weights:
            self.device.uses(Stream.COMPUTE, weight)

    def check(self, expected: Sequence[torch.Tensor]) -> None:
        self.device.check()
        assert all(map(same_bits, self.weights, expected))


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_link_brings_what_is_expected_and_takes_back_what_was_changed(seed: int | None) -> None:
    program = Program(SimulatedDevice(seed))
    program.pass_all()
    program.use()
    program.check(program.expected)
    assert program.link.kept == set()


def test_link_brings_loads_ahead_of_the_work_as_slots_are_free() -> None:
    device = SimulatedDevice()
    program = Program(device)
    loads = program.loads()
    program.link.expect(loads)
    assert device.num_copies == 2 * NUM_SLOTS
    for load in loads:
        program.work(load)
    program.link.finish()
    assert device.num_copies == 3 * len(loads)
    program.check(program.expected)


def test_gradient_is_computed_when_there_is_a_slot_for_it() -> None:
    device = SimulatedDevice(0)
    program = Program(device)
    computed: list[int] = []

    def gradient(number: int) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            computed.append(number)
            return program.gradients[number].clone()  # memory that nobody else has

        return compute

    loads = program.loads()
    for number, load in enumerate(loads):
        (item,) = load.items
        places = item.weight_place, item.gradient_place
        load.items = [Item(number, item.weight, gradient(number), *places)]
    program.link.expect(loads)
    assert computed == list(range(NUM_SLOTS))
    for load in loads:
        program.work(load)
    program.link.finish()
    program.check(program.expected)


FAULTS: dict[type[SimulatedDevice], str] = {
    GradientBeforeComputed: "down copies .* does not wait for what was computed",
    GradientTakenEarly: "up reads .* of host memory .* does not wait for down",
    ReusedBeforeComputed: "up copies .* does not wait for what was computed",
    LandingReleasedEarly: "down writes .* of host memory .* does not wait for up",
    SlotReusedEarly: "down writes .* of host memory .* does not wait for up",
    Unregistered: "no registered slab",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_order_that_is_put_back_is_found(fault: type[SimulatedDevice]) -> None:
    program = Program(fault())
    with suppress(OrderError):
        program.pass_all()
    with pytest.raises(OrderError, match=FAULTS[fault]):
        program.device.check()


# A device that fails.


class Failing(SimulatedDevice):
    """Fails in one of its copies, or in what one of its events waits for; ``fails_at`` counts calls
    of ``kind``, and is 0 when it is over.
    """

    def __init__(self, kind: str, stream: Stream, fails_at: int) -> None:
        super().__init__()
        self.kind, self.stream, self.fails_at = kind, stream, fails_at

    def _count(self, kind: str, stream: Stream) -> None:
        if (kind, stream) == (self.kind, self.stream) and self.fails_at:
            self.fails_at -= 1
            if not self.fails_at:
                raise RuntimeError("the device failed")

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._count("copy", stream)
        super().copy(stream, target, source)

    def record(self, stream: Stream) -> SimulatedEvent:
        self._count("record", stream)
        return super().record(stream)

    def wait(self, event: SimulatedEvent) -> None:
        self._count("wait", event.stream)
        super().wait(event)


@pytest.mark.parametrize("fails_at", range(1, 6))
@pytest.mark.parametrize("stream", [Stream.DOWN, Stream.UP], ids=str)
@pytest.mark.parametrize("kind", ["copy", "record", "wait"])
def test_link_that_failed_has_each_value_as_before_or_takes_it_back_later(
    kind: str, stream: Stream, fails_at: int
) -> None:
    program = Program(Failing(kind, stream, fails_at))
    loads = program.loads()
    with pytest.raises(RuntimeError, match="the device failed"):
        program.pass_all(loads)
    assert program.link.kept == set()  # it failed once, and what was left has gone up since
    done = sum(load.num_changed for load in loads)
    program.check([*program.expected[:done], *program.before[done:]])
    program.pass_all(program.loads()[done:])
    program.check(program.expected)


def test_what_cannot_be_taken_back_is_kept_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    program = Program(device)
    loads = program.loads()[:2]
    copy = device.copy

    def fail_up(stream: Stream, *tensors: Any) -> None:
        if stream is Stream.UP:
            raise RuntimeError("the device failed")
        copy(stream, *tensors)

    monkeypatch.setattr(device, "copy", fail_up)
    program.link.expect(loads)
    with pytest.raises(RuntimeError, match="the device failed"):
        program.work(loads[0])
    program.link.abandon()
    assert program.link.kept == {0}
    with pytest.raises(RuntimeError, match="the device failed"):
        program.link.finish()
    program.check(program.before)
    monkeypatch.undo()
    program.link.finish()
    assert program.link.kept == set()
    program.check([program.expected[0], *program.before[1:]])


def refuse(*_: Any) -> SimulatedEvent:
    raise RuntimeError("the device failed")


def test_what_is_forgotten_is_not_taken_back_and_its_slot_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice()
    program = Program(device)
    monkeypatch.setattr(device, "wait", refuse)
    program.link.expect(loads := program.loads())
    with pytest.raises(RuntimeError, match="the device failed"):
        program.work(loads[0])
    program.link.abandon()
    monkeypatch.undo()
    program.link.settle()
    program.link.forget()
    assert program.link.kept == set()
    program.pass_all()
    program.check(program.expected)


class Deaf(SimulatedDevice):
    """A device that nobody can wait for, on a stream or on the host, while it ``is_deaf``."""

    is_deaf = False

    def wait(self, event: SimulatedEvent) -> None:
        if self.is_deaf:
            raise RuntimeError("the device failed")
        super().wait(event)

    def wait_for(self, stream: Stream, event: Any) -> None:
        if self.is_deaf and stream is Stream.COMPUTE:
            raise RuntimeError("the device failed")
        super().wait_for(stream, event)


@pytest.mark.parametrize("num_worked", range(4))
def test_slot_is_held_with_both_ends_of_its_copies_until_a_wait_has_succeeded(
    num_worked: int,
) -> None:
    device = Deaf()
    program = Program(device)
    loads = program.loads()
    program.link.expect(loads)
    for load in loads[:num_worked]:
        program.work(load)
    device.is_deaf = True
    with pytest.raises(RuntimeError, match="the device failed"):
        program.work(loads[num_worked])
    program.link.abandon()
    for wait in (program.link.settle, program.link.finish):
        with pytest.raises(RuntimeError, match="the device failed"):
            wait()
    held = {load.slot.data_ptr() for load in loads if load.slot is not None}
    free = {slot.data_ptr() for slot in program.link._free}
    assert held.isdisjoint(free)
    assert len(held | free) == NUM_SLOTS
    program.gradients, gradients = [g.clone() for g in program.gradients], program.gradients
    del gradients  # those that may be read still have other owners
    device.is_deaf = False
    program.link.finish()
    assert len(program.link._free) == NUM_SLOTS
    program.check([*program.expected[:num_worked], *program.before[num_worked:]])
    program.pass_all(program.loads()[num_worked:])
    program.check(program.expected)


def test_what_is_under_way_when_nobody_could_wait_does_not_overtake_what_is_computed() -> None:
    device = Failing("wait", Stream.UP, 0)
    program = Program(device)
    loads = program.loads()
    program.link.expect(loads)
    program.work(loads[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "wait", refuse)
        program.link.abandon()
    with torch.no_grad():
        program.weights[0].fill_(3.0)  # the program loads others
    program.link.settle()
    program.link.forget()
    assert bool((program.weights[0] == 3.0).all())
