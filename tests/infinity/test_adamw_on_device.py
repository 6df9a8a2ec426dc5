"""OffloadedAdamW with parameters on a device with memory of its own, simulated: the bits of
parameters on the CPU, all copies ordered, and steps that failures of the device do not lose.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW
from infinity.optim.adamw import AdamRule
from swap.device.interface import Stream
from swap.device.opening import DEVICES
from swap.tiers import BudgetError
from tests.support.adamw_model import (
    AMPLE,
    DTYPES,
    backward,
    files_in,
    make_model,
    same,
    train,
    values,
)
from tests.support.interrupts import interrupt, sampled
from tests.support.memory import folder_in_memory
from tests.support.proof import matrix
from tests.support.simulated_device import OrderError, SimulatedDevice
from tests.support.simulated_device.failing import Failing, succeeds
from tests.support.simulated_device.faults import (
    GradientBeforeComputed,
    GradientTakenEarly,
    LandingReleasedEarly,
    ReusedBeforeComputed,
    SlotReusedEarly,
    Unregistered,
)
from tests.support.simulated_device.injected import Make, simulated

pytestmark = pytest.mark.usefixtures("one_thread")
tmp_path = folder_in_memory()
STEPS = 4
SMALL = 9_300_000
"""Bytes that leave most of the state on NVMe, beside a link."""
SMALL_BESIDE_OTHERS = 10_300_000
"""The same where parameters are added to others."""
MOMENTS: dict[str, Make] = {
    "latest": SimulatedDevice,
    "earliest": lambda: SimulatedDevice(eager=True),
    **{f"seed {seed}": partial(SimulatedDevice, seed) for seed in range(4)},
}


def optimizer_of(model: nn.Module, nvme: Path, memory: int | str = AMPLE) -> OffloadedAdamW:
    return OffloadedAdamW(model.parameters(), lr=1e-2, nvme=nvme, host_memory=memory)


def outcome(model: nn.Module, optimizer: OffloadedAdamW) -> list[torch.Tensor]:
    """Weights and all state."""
    state = optimizer.state_dict()["state"]
    return [*values(model), *(tensor for entry in state.values() for tensor in entry.values())]


def trained(
    dtype: torch.dtype, nvme: Path, memory: int | str = AMPLE, *, clips: bool = False
) -> list[torch.Tensor]:
    model = make_model(dtype)
    with optimizer_of(model, nvme, memory) as optimizer:
        for step in range(STEPS):
            backward(model, step)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        assert (optimizer.report().nvme_bytes > 0) == (memory != AMPLE)
        return outcome(model, optimizer)


CELLS = [*product(DTYPES, (False, True), (AMPLE, SMALL), MOMENTS)]
USUAL = [
    (torch.float32, True, AMPLE, "latest"),
    (torch.float32, False, SMALL, "seed 1"),
    (torch.bfloat16, True, SMALL, "latest"),
    (torch.float16, False, SMALL, "earliest"),
]


@pytest.mark.parametrize(("dtype", "clips", "memory", "moment"), matrix(CELLS, usual=USUAL))
def test_steps_on_a_device_have_the_bits_of_steps_on_the_cpu(
    dtype: torch.dtype, clips: bool, memory: int | str, moment: str, tmp_path: Path
) -> None:
    expected = trained(dtype, tmp_path, clips=clips)
    with simulated(MOMENTS[moment]) as devices:
        assert same(trained(dtype, tmp_path, memory, clips=clips), expected)
    assert devices[0].num_copies > 0
    assert devices[0]._slabs == []  # registered no more


def test_forward_right_after_a_step_computes_with_the_new_weights(tmp_path: Path) -> None:
    with simulated() as devices:
        model = make_model()
        with optimizer_of(model, tmp_path, SMALL) as optimizer:
            for step in range(STEPS):
                backward(model, step)
                optimizer.step()
                for parameter in model.parameters():
                    devices[0].uses(Stream.COMPUTE, parameter.detach())
                assert not any(value.isnan().any() for value in values(model))
                optimizer.zero_grad()


FAULTS: dict[type[SimulatedDevice], str] = {
    GradientBeforeComputed: "down copies .* does not wait for what was computed",
    GradientTakenEarly: "up reads .* does not wait for down|let go of while down may still write",
    ReusedBeforeComputed: "up copies .* does not wait for what was computed",
    LandingReleasedEarly: "down writes .* does not wait for up",
    SlotReusedEarly: "down writes .* does not wait for up",
    Unregistered: "no registered slab",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_order_that_is_put_back_is_found(
    fault: type[SimulatedDevice], tmp_path: Path
) -> None:
    with pytest.raises(OrderError, match=FAULTS[fault]), simulated(fault):
        trained(torch.float32, tmp_path, SMALL)


def test_next_subgroup_comes_down_while_one_is_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first kernel of a subgroup runs, the gradient of the next one has been asked for."""
    device, apply = SimulatedDevice(), AdamRule.apply
    begun: list[int] = []

    def seen(rule: AdamRule, segment: Any, *arguments: Any) -> None:
        if not begun or segment.subgroup != subgroups[-1]:
            begun.append(device.num_copies)
            subgroups.append(segment.subgroup)
        apply(rule, segment, *arguments)

    subgroups: list[int] = []
    monkeypatch.setattr(AdamRule, "apply", seen)
    monkeypatch.setitem(DEVICES, "cpu", lambda _: device)
    parameters = [nn.Parameter(torch.ones(30_000)) for _ in range(20)]
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=SMALL) as optimizer:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert len(subgroups) > 3
    downward = 2 * len(parameters)
    each = downward / len(subgroups)
    assert all(copies >= min(2 * each, downward) for copies in begun)
    device.check()


def test_strided_gradients_are_gathered_on_the_device(tmp_path: Path) -> None:
    def stepped() -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(700, 600)), nn.Parameter(torch.randn(48))]
        parameters[0].grad = torch.randn(600, 700).t()
        parameters[1].grad = torch.tensor(0.5).expand(48)
        with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=SMALL) as optimizer:
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    expected = stepped()
    with simulated(partial(SimulatedDevice, 2)):
        assert same(stepped(), expected)


def test_parameters_come_and_go_beside_a_link(tmp_path: Path) -> None:
    def run() -> list[torch.Tensor]:
        model = make_model(torch.bfloat16)
        with OffloadedAdamW(
            model[0].parameters(), lr=1e-2, nvme=tmp_path, host_memory=SMALL_BESIDE_OTHERS
        ) as optimizer:
            train(model, optimizer, range(1))
            model.zero_grad()
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
            train(model, optimizer, range(1, 2))
            optimizer.save(tmp_path / "saved")
            saved = values(model)
            train(model, optimizer, range(2, 3))
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), saved, strict=True):
                    parameter.copy_(value)
            optimizer.load(tmp_path / "saved")
            train(model, optimizer, range(2, 4))
            assert optimizer.report().host_bytes <= SMALL_BESIDE_OTHERS
            return outcome(model, optimizer)

    expected = run()
    with simulated() as devices:
        assert same(run(), expected)
    assert len(devices) == 1


# What fails.


FAILURES = [*product(("copy", "wait"), (Stream.DOWN, Stream.UP), (1, 2, 9, 23, 40), (1, 3))]
USUAL_FAILURES = [
    ("copy", Stream.DOWN, 9, 1),
    ("wait", Stream.DOWN, 2, 3),
    ("copy", Stream.UP, 2, 3),
    ("wait", Stream.UP, 1, 1),
    ("wait", Stream.UP, 1, 3),
]


@pytest.mark.parametrize(
    ("kind", "stream", "fails_at", "times"), matrix(FAILURES, usual=USUAL_FAILURES)
)
def test_step_that_a_device_stopped_is_finished_by_flush_exactly(
    kind: str, stream: Stream, fails_at: int, times: int, tmp_path: Path
) -> None:
    dtype = torch.bfloat16
    expected = trained(dtype, tmp_path)
    model, stopped = make_model(dtype), 0
    make = partial(Failing, kind, stream, fails_at, times)
    with simulated(make), optimizer_of(model, tmp_path, SMALL) as optimizer:
        for step in range(STEPS):
            backward(model, step)
            call: Callable[[], object] = optimizer.step
            while not succeeds(call):
                stopped += 1
                with pytest.raises(RuntimeError, match=r"optimizer\.flush\(\)"):
                    optimizer.step()
                assert optimizer.report().steps == step
                call = optimizer.flush
            assert optimizer.report().steps == step + 1
            optimizer.zero_grad()
        assert same(outcome(model, optimizer), expected)
    assert stopped >= 1


def test_step_that_a_device_stopped_is_given_up_by_load(tmp_path: Path) -> None:
    """Its new weights are not copied over those that the program loads."""

    def train_again() -> None:
        optimizer.load(tmp_path / "saved")
        model.load_state_dict(saved)
        optimizer.flush()
        assert same(values(model), [*saved.values()])
        train(model, optimizer, range(1, 2))

    model = make_model()
    with simulated(Failing) as devices, optimizer_of(model, tmp_path, SMALL) as optimizer:
        train(model, optimizer, range(1))
        optimizer.save(tmp_path / "saved")
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        train_again()
        expected = outcome(model, optimizer)
        (device,) = devices
        assert isinstance(device, Failing)
        device.fail("copy", Stream.UP, 3, 100)
        backward(model, 2)
        with pytest.raises(RuntimeError, match="the device failed"):
            optimizer.step()
        assert optimizer._engine._updater.kept
        device.fail("copy", Stream.UP, 0, 0)
        model.zero_grad()
        train_again()
        assert same(outcome(model, optimizer), expected)


def test_optimizer_is_closed_while_new_weights_are_kept(tmp_path: Path) -> None:
    model = make_model()
    with simulated(partial(Failing, "copy", Stream.UP, 3, 1000)) as devices:
        optimizer = optimizer_of(model, tmp_path, SMALL)
        backward(model, 0)
        with pytest.raises(RuntimeError, match="the device failed"):
            optimizer.step()
        optimizer.close()
        assert devices[0]._slabs == []
    assert files_in(tmp_path) == []


class NoStreams(SimulatedDevice):
    """A device that has no memory for streams."""

    def __init__(self) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


class NoRegistration(SimulatedDevice):
    def register(self, slab: Any) -> Callable[[], None]:
        raise RuntimeError("cannot register host memory")


@pytest.mark.parametrize("make", [NoStreams, NoRegistration])
def test_device_without_a_link_is_an_error_that_leaves_nothing(make: Make, tmp_path: Path) -> None:
    with simulated(make), pytest.raises(RuntimeError, match=r"out of memory|cannot register"):
        optimizer_of(make_model(), tmp_path, SMALL)
    assert files_in(tmp_path) == []


def test_parameters_whose_link_cannot_be_made_leave_the_optimizer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = make_model(), make_model()
    with OffloadedAdamW([nn.Parameter(torch.ones(5))], nvme=tmp_path, host_memory=SMALL) as other:
        host_bytes = other.report().host_bytes
        monkeypatch.setitem(DEVICES, "cpu", lambda _: NoRegistration())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot register"):
                other.add_param_group({"params": list(model.parameters()), "lr": 1e-2})
        assert other.report().host_bytes == host_bytes
        assert len(other.param_groups) == 1
        device = SimulatedDevice()
        monkeypatch.setitem(DEVICES, "cpu", lambda _: device)
        other.add_param_group({"params": list(model.parameters()), "lr": 1e-2})
        train(model, other, range(2))
        device.check()
    monkeypatch.delitem(DEVICES, "cpu")
    with optimizer_of(expected, tmp_path) as optimizer:
        train(expected, optimizer, range(2))
    assert same(values(model), values(expected))


def test_budget_error_of_a_link_opens_no_device(tmp_path: Path) -> None:
    with simulated() as devices, pytest.raises(BudgetError):
        optimizer_of(make_model(), tmp_path, 1)
    assert devices == []


def test_interrupted_step_on_a_device_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    def after(steps: int) -> list[torch.Tensor]:
        model = make_model()
        with optimizer_of(model, tmp_path) as optimizer:
            train(model, optimizer, range(steps))
            return outcome(model, optimizer)

    whole = [after(1), after(2)]

    def run(number: int | None) -> tuple[int, list[torch.Tensor]]:
        model = make_model()
        with simulated(), optimizer_of(model, tmp_path, SMALL) as optimizer:
            train(model, optimizer, range(1))
            backward(model, 1)
            lines = interrupt(optimizer.step, number)
            return lines.seen, outcome(model, optimizer)

    for number in sampled(run(None)[0], 8):
        found = run(number)[1]
        assert any(same(found, expected) for expected in whole)
