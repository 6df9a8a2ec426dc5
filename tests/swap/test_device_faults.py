"""The simulated device finds what is not ordered: each fault that is put back is an error."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from aio import Slab
from swap.cache.device_arena import DeviceArena
from swap.device.interface import Stream
from swap.device.memory import DeviceMemory
from swap.plan.layout import PIECE, pack
from tests.support.simulated_device import OrderError, SimulatedDevice
from tests.support.simulated_device.faults import (
    GradientBeforeComputed,
    GradientTakenEarly,
    LandingReleasedEarly,
    NoWaitBeforeCompute,
    ReadBackBeforeCome,
    ReusedBeforeComputed,
    ReusedBeforeReadBack,
    SlotReusedEarly,
    Unregistered,
)
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

NUM = 5
PAGE_BYTES = PIECE * 4


def _train(device: SimulatedDevice, folder: Path, *, room: int = 2) -> None:
    """A few steps over weights of which so many fit the device; those of the last step are there
    ahead of it, and not computed with.
    """
    placement = placement_of(
        pack(specs_of([PIECE] * NUM), PIECE),
        arena_bytes=2 * PAGE_BYTES,
        inbox_bytes=4 * PAGE_BYTES,
        device_bytes=room * PAGE_BYTES,
        state_on_nvme=lambda unit: unit != 1,
    )
    with ExitStack() as stack:
        rig = TieredRig(stack, folder, placement, device=device)
        fill_both(rig.state, rig.plain)
        for _ in range(3):
            for number, parameter in enumerate([*range(NUM), *reversed(range(NUM))]):
                weight = rig.state.weights.acquire([parameter], "use")[0]
                assert same_bits(weight, rig.plain.weight(parameter))
                del weight
                rig.state.weights.release("use")
                if number >= NUM:
                    add_to_both(rig.state, rig.plain, parameter, seed=number)
            step_both(rig.state, rig.plain, range(NUM))
        assert_same(rig.state, rig.plain)
        rig.state.weights.drop()
        rig.state.weights.borrow(0)
        for parameter in range(NUM):
            add_to_both(rig.state, rig.plain, parameter, seed=20 + parameter)
        step_both(rig.state, rig.plain, range(NUM))
        assert_same(rig.state, rig.plain)


def _use_again(device: SimulatedDevice, folder: Path) -> None:
    """The update reads weights back, whose memory others get at once."""
    host = Slab(2 * PAGE_BYTES)
    device.register(host)
    values, out = (torch.from_numpy(host.allocate(PAGE_BYTES)).view(torch.float32) for _ in "ab")
    values.fill_(1.0)
    arena = DeviceArena(device, DeviceMemory(device, PAGE_BYTES), None)
    (spec,) = specs_of([PIECE])
    for _ in range(2):
        entry = arena.new(spec, landing=False)
        arena.fill(entry, 0, values)
        copy = arena.read_back(entry, 0, out)
        del entry
    assert copy is not None
    copy.result()
    assert same_bits(out, values)


_roomy = partial(_train, room=2 * NUM)
Scene = Callable[[SimulatedDevice, Path], None]
FAULTS: dict[type[SimulatedDevice], tuple[Scene, str]] = {
    NoWaitBeforeCompute: (_train, "compute reads .* does not wait for up"),
    ReusedBeforeComputed: (_train, "up writes .* does not wait for compute"),
    ReusedBeforeReadBack: (_use_again, "up writes .* does not wait for back"),
    GradientBeforeComputed: (_train, "does not wait for what was computed"),
    ReadBackBeforeCome: (_roomy, "back reads .* does not wait for up"),
    LandingReleasedEarly: (_train, "let go of while up may still read"),
    SlotReusedEarly: (_roomy, "let go of while up may still read"),
    GradientTakenEarly: (_train, "let go of while down may still write"),
    Unregistered: (_train, "no registered slab"),
}
"""What is done, and what the error says."""


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize("scene", [_train, _roomy, _use_again], ids=["tight", "roomy", "again"])
def test_what_is_without_a_fault_is_ordered(scene: Scene, seed: int | None, tmp_path: Path) -> None:
    device = SimulatedDevice(seed)
    scene(device, tmp_path)
    device.check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_that_is_put_back_is_found(fault: type[SimulatedDevice], tmp_path: Path) -> None:
    device, (scene, message) = fault(), FAULTS[fault]
    with suppress(Exception):  # whatever else comes of it, values that are wrong for one
        scene(device, tmp_path)
    with pytest.raises(OrderError, match=message):
        device.check()


def test_memory_and_events_of_another_device_are_refused() -> None:
    device, other = SimulatedDevice(), SimulatedDevice()
    with pytest.raises(OrderError, match="of another device"):
        device.tensor(other.memory(64), 0, 4, torch.float32, None)
    with pytest.raises(OrderError, match="of another device"):
        device.wait_for(Stream.UP, other.record(Stream.UP))


def test_gradient_that_is_let_go_of_before_its_copy_is_over_is_an_error() -> None:
    device, slab = SimulatedDevice(), Slab(PAGE_BYTES)
    device.register(slab)
    gradient = random_values(1, 8)
    target = torch.from_numpy(slab.allocate(32)).view(torch.float32)
    device.wait_for(Stream.DOWN, device.record(Stream.COMPUTE))
    device.copy(Stream.DOWN, target, gradient)
    del gradient
    with pytest.raises(OrderError, match="let go of while down may still read it"):
        device.record(Stream.DOWN)


def test_memory_is_poison_until_something_is_copied_there_and_after_it_is_let_go_of() -> None:
    device, slab = SimulatedDevice(), Slab(PAGE_BYTES)
    device.register(slab)
    memory = DeviceMemory(device, PAGE_BYTES)
    source = torch.from_numpy(slab.allocate(32)).view(torch.float32).fill_(1.0)
    tensor = memory.allocate(8, torch.float32, first=Stream.UP)
    device.copy(Stream.UP, tensor, source)
    event = device.record(Stream.UP)
    assert tensor.isnan().all()
    device.wait_for(Stream.COMPUTE, event)
    assert same_bits(tensor, source)
    event.wait()
    del tensor
    assert memory.allocate(8, torch.float32, first=Stream.UP).isnan().all()
