"""OffloadedAdamW over an engine whose transfers end as late as they may, and fail."""

import errno
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from aio import AioError
from infinity import OffloadedAdamW
from infinity.adamw.tiers.loads import LEAST_LINK_BYTES
from tests.support.adamw_model import AMPLE, DTYPES, SMALL, same
from tests.support.late_engine import Faults
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.injected import simulated
from tests.support.tiers import late_engines

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = (300_000, 70_001, 5, 200_000, 130_000)
STEPS = 7


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """To some of them, another choice in each step; to all in the first and the last."""
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        is_given = step in (0, STEPS - 1) or (step + number) % 3 > 0
        parameter.grad = values if is_given else None


def outcome(parameters: list[nn.Parameter], optimizer: OffloadedAdamW) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [tensor for entry in state.values() for tensor in entry.values()]
    return [tensor.detach().clone() for tensor in (*parameters, *tensors)]


def trained(dtype: torch.dtype, nvme: Path, memory: int | str) -> list[torch.Tensor]:
    parameters = make_parameters(dtype)
    with OffloadedAdamW(parameters, lr=1e-2, nvme=nvme, host_memory=memory) as optimizer:
        for step in range(STEPS):
            give_gradients(parameters, step)
            optimizer.step()
        return outcome(parameters, optimizer)


@pytest.mark.parametrize("dtype", matrix(DTYPES, usual=[torch.bfloat16]))
def test_writes_that_end_after_their_step_leave_every_bit_as_in_memory(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = trained(dtype, tmp_path, AMPLE)
    for seed in range(3):
        with late_engines(seed) as engines:
            assert same(trained(dtype, tmp_path, SMALL), expected)
        assert engines
        with late_engines(seed), simulated(partial(SimulatedDevice, seed)) as devices:
            assert same(trained(dtype, tmp_path, SMALL + LEAST_LINK_BYTES), expected)
        assert devices[0].num_copies


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_late_transfer_that_fails_is_finished_by_flush_exactly(
    kind: str, on_device: bool, tmp_path: Path
) -> None:
    expected = trained(torch.float16, tmp_path, AMPLE)
    faults = Faults()
    parameters = make_parameters(torch.float16)
    stopped = 0
    memory = SMALL + LEAST_LINK_BYTES * on_device
    with (
        simulated() if on_device else nullcontext(),
        late_engines(1, faults),
        OffloadedAdamW(parameters, lr=1e-2, nvme=tmp_path, host_memory=memory) as optimizer,
    ):
        for step in range(STEPS):
            give_gradients(parameters, step)
            faults.arm(kind, errno.EIO, after=2 * step)  # type: ignore[arg-type]
            try:
                optimizer.step()
            except AioError:
                stopped += 1
                optimizer.flush()
            faults.disarm()
        try:
            optimizer.flush()  # of what the last step has left on its way
        except AioError:
            stopped += 1
        assert same(outcome(parameters, optimizer), expected)
    assert stopped > 2


def test_step_moves_all_state_of_a_small_subgroup_in_one_request(tmp_path: Path) -> None:
    parameters = make_parameters(torch.float16)
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=SMALL) as optimizer:
        timeline = optimizer._engine.store.timeline
        for _ in range(3):
            begun = max((event.stop for event in timeline.events()), default=0.0)
            give_gradients(parameters, 0)
            optimizer.step()
            optimizer.flush()
        moved = [event for event in timeline.events(begun) if event.kind in ("read", "write")]
    assert {event.label.split(" ", 2)[2] for event in moved} == {"master exp_avg exp_avg_sq"}
