"""Optimizers that keep something of all parameters: carried on where that is right, or refused by
name before anything is begun.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support import group_optimizers as kinds
from tests.support.models import seeded
from tests.support.training import WHOLE, Plain, least_budget, same_bits

WIDTH = 160


class _Branches(nn.Module):
    """One branch has no gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, *, is_short: bool) -> torch.Tensor:
        for layer in self.layers[: 3 if is_short else 6]:
            x = torch.tanh(layer(x))
        return x


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x, is_short=step % 2 == 1).square().sum()
    return loss


def _in_two_groups(kind: Any, parameters: list[nn.Parameter]) -> Any:
    """The second has no gradient in every other step."""
    return kind([{"params": parameters[:6]}, {"params": parameters[6:], "lr": 3e-3}])


def _beside_empty_groups(kind: Any, parameters: list[nn.Parameter]) -> Any:
    """As a trainer makes them for a model of which no parameter is without decay."""
    return kind([{"params": []}, {"params": parameters}, {"params": []}], lr=1e-2)


CARRIED: dict[str, Any] = {
    "count": kinds.CountsInGroup,
    "weights": kinds.WeighsInGroup,
    "trust ratio": kinds.TrustRatio,
    "two groups": partial(_in_two_groups, kinds.CountsInGroup),
    "empty groups": partial(_beside_empty_groups, kinds.CountsInGroup),
    "empty groups of torch": partial(_beside_empty_groups, partial(torch.optim.SGD, momentum=0.9)),
    "empty groups, with state": partial(_beside_empty_groups, torch.optim.Adagrad),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_groups_count_goes_on_from_step_to_step(name: str, nvme: Path) -> None:
    factory = CARRIED[name]
    plain = Plain(seeded(_Branches), factory)
    for step in range(5):
        _loss(plain.model, step).backward()
        plain.step()
    for host_memory in (WHOLE, least_budget(_Branches, nvme, optimizer=factory)):
        model = seeded(_Branches)
        with infinity.offload(model, nvme, optimizer=factory, host_memory=host_memory) as offloaded:
            for step in range(5):
                _loss(model, step).backward()
                offloaded.step()
            for ours, theirs in zip(
                offloaded.optimizer.param_groups, plain.optimizer.param_groups, strict=True
            ):
                if theirs["params"]:  # what an empty one counts is for nothing
                    assert _options_of(ours) == _options_of(theirs)
        for key, parameter in model.named_parameters():
            assert same_bits(parameter, plain.masters[key]), key


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def test_what_groups_count_is_saved_and_loaded(nvme: Path, tmp_path: Path) -> None:
    model = seeded(_Branches)
    with infinity.offload(model, nvme, optimizer=kinds.CountsInGroup) as offloaded:
        offloaded.save(tmp_path / "before")
        for step in range(2):
            _loss(model, step).backward()
            offloaded.step()
        offloaded.save(tmp_path / "after")
        (group,) = offloaded.optimizer.param_groups
        offloaded.load(tmp_path / "before")
        assert "step" not in group
        offloaded.load(tmp_path / "after")
        assert group["step"] == 2


REFUSED: dict[str, tuple[Any, str]] = {
    "norm over all": (partial(kinds.TrustRatio, most=1.0), "TrustRatio does not update every"),
    "norm over groups": (
        partial(_in_two_groups, partial(kinds.TrustRatio, most=1.0)),
        "TrustRatio does not update every",
    ),
    "rate from all": (kinds.EstimatesRate, "EstimatesRate does not update every parameter by"),
    "attribute": (kinds.CountsInItself, "CountsInItself does not update every"),
    "optimizer in it": (kinds.LooksAhead, "LooksAhead does not update every"),
    "closure": (kinds.NeedsClosure, "NeedsClosure cannot take a step .* without a closure"),
    "schedule-free": (kinds.ScheduleFree, r"ScheduleFree has train\(\) and eval\(\)"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS looks at all .* use infinity.AdamW"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_couples_parameters_is_refused(name: str, nvme: Path) -> None:
    factory, message = REFUSED[name]
    model = _Branches()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    with (
        pytest.raises(ValueError, match=message),
        infinity.offload(model, nvme, optimizer=factory),
    ):
        pass
    for key, value in model.named_parameters():
        assert same_bits(value, before[key])
        assert value.grad is None
