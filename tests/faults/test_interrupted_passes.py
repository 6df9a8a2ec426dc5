"""Ctrl-C in a forward or backward pass: the next passes and steps are as if it had not been."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import OffloadedModel
from infinity.autograd import residency
from infinity.parameters.offloaded.parameter import OffloadedParameter, put_data
from tests.support.interrupts import Lines, interrupt, interrupt_behind_call, sampled
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget

WIDTH = 130
NUM_SAMPLES = 5
WARM_UP = 3
"""Steps after which updates begin during the backward pass."""

How = Callable[[Callable[[], object], int | None], Lines]


class Layer(nn.Module):
    """Reaches for the weights of an inner module, beside calling one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(torch.tanh(self.inner(x)), self.out.weight)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(10)])


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, WIDTH)).square().mean()
    return loss


def train(model: nn.Module, offloaded: OffloadedModel, losses: list[float]) -> None:
    loss = loss_of(model)
    losses.append(float(loss.detach()))
    loss.backward()
    offloaded.step()


def uninterrupted(nvme: Path, num_steps: int) -> list[float]:
    model, losses = make(), list[float]()
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        for _ in range(num_steps):
            train(model, offloaded, losses)
    return losses


def clear(model: nn.Module, offloaded: OffloadedModel, number: int) -> None:
    """In both ways that programs have."""
    if number % 2:
        offloaded.optimizer.zero_grad()
    else:
        model.zero_grad()


@pytest.mark.parametrize(
    "how", matrix([interrupt, interrupt_behind_call], usual=[interrupt_behind_call])
)
def test_interrupted_passes_change_no_later_number(tmp_path: Path, how: How) -> None:
    model, losses = make(), list[float]()

    def passes() -> None:
        loss_of(model).backward()

    least = least_budget(make, tmp_path)
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        assert offloaded._training.residency.at_home[-1] is None
        for _ in range(WARM_UP):
            train(model, offloaded, losses)
        total = how(passes, None).seen
        clear(model, offloaded, 0)
        for number in sampled(total - total // 10, NUM_SAMPLES):
            assert how(passes, number).line
            clear(model, offloaded, number)
            train(model, offloaded, losses)
            assert not offloaded._training.state.weights._pins
            assert not offloaded._training.residency.held
    assert losses == uninterrupted(tmp_path, len(losses))


@pytest.mark.parametrize("is_done", [False, True])
def test_interrupt_as_weights_are_put_in_place_leaves_no_placeholder_behind(
    tmp_path: Path, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, losses = make(), list[float]()
    least = least_budget(make, tmp_path)

    last = model[-1]
    assert isinstance(last, Layer)

    def cut(parameter: OffloadedParameter, data: torch.Tensor, *, absent: bool) -> None:
        is_last = not absent and parameter is dict.get(last.inner._parameters, "weight")
        if is_done or not is_last:
            put_data(parameter, data, absent=absent)
        if is_last:
            raise KeyboardInterrupt

    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        assert offloaded._training.residency.at_home[-1] is None
        with monkeypatch.context() as patch:
            patch.setattr(residency, "put_data", cut)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model)
        for _ in range(3):
            train(model, offloaded, losses)
    assert losses == uninterrupted(tmp_path, len(losses))


def test_gradient_that_an_interrupt_left_with_autograd_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, losses = make(), list[float]()

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        with monkeypatch.context() as patch:
            patch.setattr(offloaded._training.gradients, "take", cut)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model).backward()
        offloaded.optimizer.zero_grad()
        for _ in range(2):
            train(model, offloaded, losses)
    assert losses == uninterrupted(tmp_path, len(losses))
