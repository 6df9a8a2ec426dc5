"""State of a parameter's shape that an optimizer makes late, or for large parameters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.models import seeded
from tests.support.own_optimizers import Own, has_bits_of_plain, linears, pass_back
from tests.support.training import WHOLE, least_budget, same_bits

WIDTH = 144


class _Slow(Own):
    """Looks ahead, at every step that ``period`` divides."""

    period = 5

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        state = self.state[p]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] % self.period == 0:
            if "slow" not in state:
                state["slow"] = p.clone()
            p.copy_(state["slow"].lerp_(p, 0.5))
        return 1.0


class _SlowAfterMany(_Slow):
    period = 1000


class _OfLarge(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if p.numel() < 16_500:
            return 1.0
        state = self.state[p]
        state["m"] = p.grad.lerp(state.get("m", p.grad), 0.9)
        p.sub_(state["m"], alpha=group["lr"])
        return 0.0


def _model() -> nn.Module:
    return linears(WIDTH)


@pytest.mark.parametrize("kind", [_Slow, _SlowAfterMany, _OfLarge])
def test_state_that_comes_late_or_for_large_parameters_has_components(kind: type[Own]) -> None:
    components = TorchRule(kind(_model().parameters())).components(torch.float32)
    assert [component.name for component in components] == ["m" if kind is _OfLarge else "slow"]


def _steps(model: nn.Module, optimizer: Any) -> None:
    for number in range(7):
        pass_back(model, number, WIDTH)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [_Slow, _OfLarge])
def test_late_state_has_the_bits_of_plain_torch_on_nvme(kind: type[Own], nvme: Path) -> None:
    least = least_budget(_model, nvme, optimizer=kind)
    assert has_bits_of_plain(_model, kind, nvme, host_memory=least, train=_steps)


class _Hidden(Own):
    """State that no throw-away parameter has: that of large values."""

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if p.max() > 50:
            self.state[p]["hidden"] = p.clone()
        return 1.0


def _step_and_flush(offloaded: infinity.OffloadedModel) -> None:
    offloaded.step()
    offloaded.flush()


def test_state_that_has_no_place_is_an_error_after_which_a_load_goes_on(
    nvme: Path, tmp_path: Path
) -> None:
    model: Any = seeded(_model)
    with infinity.offload(model, nvme, optimizer=_Hidden, host_memory=WHOLE) as offloaded:
        offloaded.save(tmp_path / "saved")
        with offloaded.gathered(model[1].weight, modify=True):
            model[1].weight.data[0, 0] = 100.0
        pass_back(model, 0, WIDTH)
        with pytest.raises(infinity.MixedStateError, match="_Hidden keeps the state 'hidden' with"):
            _step_and_flush(offloaded)
        offloaded.load(tmp_path / "saved")
        for number in range(2):
            pass_back(model, number, WIDTH)
            offloaded.step()
    plain = seeded(_model)
    optimizer = _Hidden(plain.parameters())
    for number in range(2):
        pass_back(plain, number, WIDTH)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    assert all(same_bits(p, expected[name]) for name, p in model.named_parameters())


class _Preconditioned(Own):
    """A matrix by a side of the parameter, which has the shape of a square one."""

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if p.dim() == 2:
            state = self.state[p]
            if not state:
                state["side"] = torch.eye(len(p))
            state["side"] += 0.01 * p.grad @ p.grad.T
            p.sub_(state["side"] @ p.grad, alpha=group["lr"])
        return 0.5


def test_matrix_that_has_the_shape_of_a_square_parameter_stays_small_state(nvme: Path) -> None:
    assert not TorchRule(_Preconditioned(_model().parameters())).components(torch.float32)
    assert has_bits_of_plain(_model, _Preconditioned, nvme, host_memory=WHOLE, train=_steps)
