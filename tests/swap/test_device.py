"""The device path over a simulated device: budgets, arrivals, and gradients on their way."""

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from aio import AioError, Slab, SlabFullError
from swap.cache.device_arena import DeviceArena
from swap.device.interface import Stream
from swap.device.memory import DeviceMemory
from swap.gradients.store import GradientStore
from swap.plan.layout import PIECE, pack
from swap.update.stages import Step
from tests.support.simulated_device import SimulatedDevice, SimulatedEvent
from tests.support.tiers import (
    TieredRig,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    random_values,
    same_bits,
    specs_of,
    step_both,
)

SPECS = specs_of([PIECE, 100, 2 * PIECE, 0])
MIB = 1 << 20


def arena_of(device: SimulatedDevice, nbytes: int, landing: Slab | None = None) -> DeviceArena:
    if landing is not None:
        device.register(landing)
    return DeviceArena(device, DeviceMemory(device, nbytes), landing)


class StuckDevice(SimulatedDevice):
    """Downloads are not finished before ``let_go``."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self, event: SimulatedEvent) -> None:
        if event.stream is Stream.DOWN:
            self.is_waited_for.set()
            self.may_end.wait()
        super().wait(event)


def test_arena_counts_elements_until_the_last_reference_is_gone() -> None:
    arena = arena_of(SimulatedDevice(), 5 * PIECE * 4)
    first = arena.new(SPECS[0], landing=False)
    second = arena.new(SPECS[2], landing=False)
    assert arena.used_bytes == arena.peak_bytes == 3 * PIECE * 4
    with pytest.raises(SlabFullError) as caught:
        arena.new(specs_of([3 * PIECE])[0], landing=False)
    assert (caught.value.asked, caught.value.free) == (3 * PIECE * 4, 2 * PIECE * 4)
    view = second.weight[:1]
    del first, second
    assert arena.used_bytes == 2 * PIECE * 4
    del view
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 3 * PIECE * 4


def test_arena_holds_exactly_its_bytes() -> None:
    arena = arena_of(SimulatedDevice(), PIECE * 4 + 512)
    entries = [arena.new(SPECS[0], landing=False), arena.new(SPECS[1], landing=False)]
    with pytest.raises(SlabFullError):
        arena.new(specs_of([1])[0], landing=False)
    assert arena.new(SPECS[3], landing=False).weight.numel() == 0
    assert len(entries) == 2


def test_arena_is_told_when_another_thread_lets_go() -> None:
    arena = arena_of(SimulatedDevice(), PIECE * 4)
    kept = [arena.new(SPECS[0], landing=False)]
    with pytest.raises(SlabFullError):
        arena.new(SPECS[0], landing=False)
    assert not arena.wait_for_release(0.0)
    thread = threading.Thread(target=kept.clear)
    thread.start()
    assert arena.wait_for_release(10.0)
    thread.join()
    arena.new(SPECS[0], landing=False)


def test_landing_buffers_come_back_when_their_uploads_end() -> None:
    device, landing = SimulatedDevice(), Slab(PIECE * 4)
    arena = arena_of(device, 10 * PIECE * 4, landing)
    entry = arena.new(SPECS[0], landing=True)
    assert entry.landing is not None
    entry.landing.copy_(random_values(1, PIECE))
    entry.landed.append((0, PIECE))
    arena.arrived(entry)
    assert not arena.can_land(SPECS[0])
    with pytest.raises(SlabFullError):
        arena.new(SPECS[0], landing=True)
    assert arena.wait_for_release(0.0)
    assert arena.can_land(SPECS[0])
    arena.new(SPECS[0], landing=True)
    assert same_bits(arena.ready(entry), random_values(1, PIECE))
    device.check()


@pytest.fixture
def stuck() -> Iterator[StuckDevice]:
    device = StuckDevice()
    yield device
    device.may_end.set()


class Rig(TieredRig):
    """Two parameters with subgroups of their own on NVMe, updated speculatively, on a device."""

    def __init__(self, stack: ExitStack, folder: Path, device: SimulatedDevice | None) -> None:
        specs = specs_of([PIECE, PIECE])
        placement = placement_of(
            pack(specs, PIECE),
            arena_bytes=2 * PIECE * 4,
            inbox_bytes=8 * PIECE * 4,
            device_bytes=4 * PIECE * 4,
            gradient_on_nvme=lambda _: False,
        )
        super().__init__(stack, folder, placement, device=device)
        if device is not None:
            stack.callback(device.check)
        fill_both(self.state, self.plain)
        self.state.speculation.expect_step = lambda: Step(
            updates=self.plain.updates([0, 1]), gradient_scale=1.0
        )

    def learn(self) -> None:
        """A first step, so that the next ones are predictable."""
        self.learn_without_waiting()
        self.state.flush()

    def learn_without_waiting(self) -> None:
        for parameter in range(2):
            add_to_both(self.state, self.plain, parameter, seed=parameter)
        step_both(self.state, self.plain, [0, 1])


@pytest.mark.timeout(60)
def test_flush_waits_for_gradients_that_would_begin_a_speculative_update(
    tmp_path: Path, stuck: StuckDevice
) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, stuck)
        stuck.may_end.set()
        rig.learn()
        stuck.may_end.clear()
        stuck.is_waited_for.clear()
        add_to_both(rig.state, rig.plain, 0, seed=5)
        stuck.is_waited_for.wait()
        wait, roll_back = rig.state._await_gradients, rig.state.speculation.roll_back

        def wait_when_free() -> None:
            stuck.may_end.set()
            wait()

        def roll_back_and_let_one_arrive() -> None:
            roll_back()
            wait_when_free()

        with (
            patch.object(rig.state, "_await_gradients", wait_when_free),
            patch.object(rig.state.speculation, "roll_back", roll_back_and_let_one_arrive),
        ):
            rig.state.flush()
        add_to_both(rig.state, rig.plain, 1, seed=6)
        step_both(rig.state, rig.plain, [0, 1])
        assert_same(rig.state, rig.plain)


def test_second_gradient_on_its_way_rolls_back_the_update_of_the_first(
    tmp_path: Path, stuck: StuckDevice
) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, stuck)
        stuck.may_end.set()
        rig.learn()
        stuck.may_end.clear()
        for seed in (5, 6):
            if seed == 6:
                stuck.may_end.set()
            add_to_both(rig.state, rig.plain, 0, seed=seed)
        add_to_both(rig.state, rig.plain, 1, seed=7)
        step_both(rig.state, rig.plain, [0, 1])
        assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("is_device", [True, False], ids=["device", "host"])
def test_lost_gradient_stops_every_step_until_it_is_cleared(
    tmp_path: Path, is_device: bool
) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, SimulatedDevice(eager=True) if is_device else None)
        failure = AioError("broken", errno=errno.EIO, filename="a", offset=4096, nbytes=8192)
        with patch.object(GradientStore, "_store", side_effect=failure):
            with suppress(AioError):
                rig.state.add_gradient(0, random_values(1, PIECE))
            assert rig.state.has_gradient(0)  # or clearing it would be left out
        rig.state.add_gradient(1, random_values(2, PIECE))
        for _ in range(2):
            with pytest.raises(AioError, match=r"gradient of p0 was lost .*broken.*zero_grad") as e:
                rig.state.step(rig.plain.updates([1]), 1.0)
            assert (e.value.errno, e.value.filename) == (errno.EIO, "a")
            assert (e.value.offset, e.value.nbytes) == (4096, 8192)
        rig.state.flush()
        assert_same(rig.state, rig.plain)
        rig.state.clear_gradients()
        rig.learn()
        assert_same(rig.state, rig.plain)


def test_flush_finishes_a_step_that_stopped_also_when_a_gradient_was_lost(tmp_path: Path) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, SimulatedDevice(eager=True))
        rig.faults.arm("write", errno.EIO)
        rig.learn_without_waiting()
        rig.state.pipeline.join()
        failure = AioError("broken", errno=errno.EIO)
        rig.state.gradients.lose(0, failure)
        rig.state.flush()
        assert_same(rig.state, rig.plain)
