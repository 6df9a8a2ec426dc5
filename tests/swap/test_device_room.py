"""Room on a device, and for what lands on the way there: what is short of one is no reason to give
up the other.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from aio import SlabFullError
from swap.device.interface import Stream
from swap.device.memory import DeviceMemory
from swap.plan.layout import PIECE, pack
from swap.tiers import BudgetError
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.memory import Block
from tests.support.tiers import TieredRig, fill_both, placement_of, same_bits, specs_of

PAGE_BYTES = PIECE * 4


def rig_of(
    stack: ExitStack, folder: Path, *, num: int, landing: int, room: int, seed: int | None = None
) -> TieredRig:
    """Parameters of one piece each, all on NVMe."""
    placement = placement_of(
        pack(specs_of([PIECE] * num), PIECE),
        arena_bytes=landing * PAGE_BYTES,
        inbox_bytes=2 * PAGE_BYTES,
        device_bytes=room * PAGE_BYTES,
    )
    rig = TieredRig(stack, folder, placement, device=SimulatedDevice(seed))
    rig.engine.eager = 1.0
    fill_both(rig.state, rig.plain)
    return rig


def use(rig: TieredRig, parameter: int) -> None:
    (weight,) = rig.state.weights.acquire([parameter], "use")
    assert same_bits(weight, rig.plain.weight(parameter))
    rig.state.weights.release("use")


@pytest.mark.parametrize("landing", [1, 2])
def test_weights_on_the_device_stay_when_nothing_more_can_land(
    tmp_path: Path, landing: int
) -> None:
    """With room for all of them, each is read once."""
    with ExitStack() as stack:
        rig = rig_of(stack, tmp_path, num=8, landing=landing, room=8)
        for parameter in range(4):
            use(rig, parameter)
        weights = rig.state.weights.acquire(range(4, 8), "together")
        for parameter, weight in enumerate(weights, 4):
            assert same_bits(weight, rig.plain.weight(parameter))
        rig.state.weights.release("together")
        for parameter in range(8):
            use(rig, parameter)
        reads = [lane for kind, lane, _ in rig.engine.log if kind == "read"]
        assert len(reads) == 8
        assert len(rig.state.weights._entries) == 8


@pytest.mark.parametrize("landing", [1, 2, 3])
def test_weights_that_have_no_room_on_the_device_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landing: int
) -> None:
    """And no wait for what is dropped in looking for it: room to land, that is free as before."""
    monkeypatch.setattr("swap.cache.weight_cache._RELEASE_SECONDS", 0.1)
    with ExitStack() as stack:
        rig = rig_of(stack, tmp_path, num=4, landing=landing, room=2)
        for parameter in range(2):
            rig.state.weights.acquire([parameter], f"held {parameter}")
        with pytest.raises(BudgetError, match="device_memory"):
            rig.state.weights.acquire([2], "more")
        rig.state.weights.release("held 0")
        use(rig, 3)


@pytest.mark.parametrize("room", [4, 40, 64])
def test_prefetch_is_as_far_ahead_whatever_the_room_on_the_device(
    tmp_path: Path, room: int
) -> None:
    """What is read on demand does not grow with the arena: here it is the first one at most."""
    num = room + 8
    with ExitStack() as stack:
        rig = rig_of(stack, tmp_path, num=num, landing=2, room=room)
        weights = rig.state.weights
        for _ in range(2):
            for parameter in (*range(num), *reversed(range(num))):
                use(rig, parameter)
            weights.end_cycle()
        before = weights.misses
        for parameter in (*range(num), *reversed(range(num))):
            use(rig, parameter)
        assert weights.misses - before <= 1


class _Full(SimulatedDevice):
    """Has memory for one block."""

    def memory(self, nbytes: int) -> Block:
        if self._blocks:
            raise MemoryError("the device is full")
        return super().memory(nbytes)


def test_memory_between_others_is_had_apart_within_the_same_bytes() -> None:
    device = SimulatedDevice()
    memory = DeviceMemory(device, 4 * PAGE_BYTES)
    parts = [memory.allocate(PIECE, torch.float32, first=Stream.UP) for _ in range(4)]
    del parts[2], parts[0]
    with pytest.raises(SlabFullError):
        memory.allocate(2 * PIECE, torch.float32, first=Stream.UP)
    apart = memory.allocate(2 * PIECE, torch.float32, first=Stream.UP, apart=True)
    assert apart.numel() == 2 * PIECE
    assert memory.used_bytes == memory.nbytes
    with pytest.raises(SlabFullError):
        memory.allocate(1, torch.float32, first=Stream.UP, apart=True)
    del apart
    assert memory.used_bytes == 2 * PAGE_BYTES
    device.check()


def test_device_that_is_full_has_no_room_and_is_no_error() -> None:
    memory = DeviceMemory(_Full(), 4 * PAGE_BYTES)
    parts = [memory.allocate(PIECE, torch.float32, first=Stream.UP) for _ in range(4)]
    del parts[2], parts[0]
    with pytest.raises(SlabFullError) as caught:
        memory.allocate(2 * PIECE, torch.float32, first=Stream.UP, apart=True)
    assert (caught.value.free, caught.value.largest_free) == (2 * PAGE_BYTES, PAGE_BYTES)


def test_memory_that_an_interrupt_lost_sight_of_comes_back() -> None:
    memory = DeviceMemory(SimulatedDevice(), PAGE_BYTES)
    held = [memory.allocate(PIECE, torch.float32, first=Stream.UP)]
    held.clear()
    memory._ended.get_nowait()  # taken by who waited for it, and never told
    again = memory.allocate(PIECE, torch.float32, first=Stream.UP)
    assert again.numel() == PIECE
