"""Optimizers that go by the place of a parameter, by lists beside ``params``, or by its class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.own_optimizers import Own, has_bits_of_plain, linears, pass_back
from tests.support.training import WHOLE, least_budget


def _at(p: Any, group: dict[str, Any]) -> int:
    return [q is p for q in group["params"]].index(True)


class _ByLayer(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(0.5 ** (_at(p, group) // 4))


class _ByName(Own):
    def made(self) -> None:
        for group in self.param_groups:
            group["names"] = ["layer"] * (len(group["params"]) - 1) + ["head"]

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if group["names"][_at(p, group)] == "head" else 1.0


class _ByScale(Own):
    """From the second step on."""

    def made(self) -> None:
        for group in self.param_groups:
            group["scales"] = torch.ones(len(group["params"]))
            group["scales"][-2:-1] = 0.5

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        state = self.state[p]
        state["n"] = state.get("n", 0) + 1
        return float(group["scales"][_at(p, group)]) if state["n"] > 1 else 1.0


class _ByNumber(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.5 if len(group["params"]) > 5 else 1.0


@pytest.mark.parametrize("kind", [_ByLayer, _ByName, _ByScale, _ByNumber])
def test_optimizer_that_goes_by_the_place_of_a_parameter_is_refused_by_name(
    kind: type[Own],
) -> None:
    model = linears()
    with pytest.raises(ValueError, match=rf"{kind.__name__} .*by its place in its group.*lr_scale"):
        TorchRule(kind(model.parameters()))
    if kind is not _ByNumber:
        groups = [{"params": [p]} for p in model.parameters()]
        TorchRule(kind(groups))


class _ByAttribute(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(getattr(p, "lr_scale", 1.0))


class _ByOwnName(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if "2" in group["param_names"][_at(p, group)] else 1.0


class _Special(nn.Parameter):
    pass


class _ByClass(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if isinstance(p, _Special) else 1.0


def _marked() -> nn.Module:
    model: Any = linears()
    model[1].weight.lr_scale = 0.5
    model[2].bias.lr_scale = torch.full((24,), 0.1).mean()
    model[2].weight = _Special(model[2].weight.detach())
    return model


def _steps(model: nn.Module, optimizer: Any) -> None:
    for number in range(4):
        pass_back(model, number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [_ByAttribute, _ByClass])
@pytest.mark.parametrize("is_least", [True, False])
def test_optimizer_that_goes_by_what_a_parameter_is_has_the_bits_of_plain_torch(
    kind: type[Own], is_least: bool, nvme: Path
) -> None:
    host_memory = least_budget(_marked, nvme, optimizer=kind) if is_least else WHOLE
    assert has_bits_of_plain(_marked, kind, nvme, host_memory=host_memory, train=_steps)


def test_names_that_torch_keeps_are_found_by_updates() -> None:
    TorchRule(_ByOwnName(linears().named_parameters()))


class _Watching(torch.Tensor):
    """Gives tensors of its class."""


def test_class_that_updates_cannot_have_is_refused_where_steps_go_by_it() -> None:
    class _ByOther(Own):
        def factor(self, p: Any, group: dict[str, Any]) -> float:
            return 0.1 if isinstance(p, _Watching) else 1.0

    made: Any = torch.ones(4, 4).as_subclass(_Watching)
    parameters = [nn.Parameter(torch.ones(4, 4)), made.requires_grad_()]
    with pytest.raises(ValueError, match=r"_ByOther .*goes by its class \(_Watching\)"):
        TorchRule(_ByOther(parameters))
    TorchRule(_ByAttribute(parameters))


def test_one_update_is_tried_for_all_parameters_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []

    class _Counted(Own):
        def begin(self) -> None:
            steps.append(sum(len(group["params"]) for group in self.param_groups))

    counts = []
    for number in (30, 300):
        steps.clear()
        TorchRule(_Counted([nn.Parameter(torch.ones(2, 2)) for _ in range(number)]))
        counts.append(len(steps))
        assert steps.count(number) == 2
    assert counts[0] == counts[1]
