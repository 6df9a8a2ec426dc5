"""Attributes that first steps of an optimizer set by what they find are refused by name, and trials
leave nothing behind.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.own_optimizers import Own, has_bits_of_plain, linears, pass_back
from tests.support.training import WHOLE


class _FirstRate(Own):
    def made(self) -> None:
        self.first: Any = None

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if self.first is None:
            self.first = group["lr"]
        return float(group["lr"] / self.first)


class _FirstRateInDict(Own):
    def made(self) -> None:
        self.first: dict[str, float] = {}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(group["lr"] / self.first.setdefault("lr", group["lr"]))


class _FirstBeta(Own):
    def made(self) -> None:
        self.first: Any = None

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if self.first is None:
            self.first = group["betas"][1]
        return float(group["betas"][1] / self.first)


class _FirstWidth(Own):
    def made(self) -> None:
        self.first = 0

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        self.first = self.first or max(p.shape)
        return float(self.first**-0.5)


class _LargestWidth(Own):
    def made(self) -> None:
        self.first = 0

    def begin(self) -> None:
        if not self.first:
            self.first = max(p.shape[-1] for g in self.param_groups for p in g["params"])

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(self.first**-0.5)


LAZY = [_FirstRate, _FirstRateInDict, _FirstBeta, _FirstWidth, _LargestWidth]


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("lr", [1e-2, 1, torch.tensor(0.1)])
def test_attribute_that_the_first_step_sets_by_what_it_finds_is_refused_by_name(
    kind: type[Own], lr: Any
) -> None:
    optimizer: Any = kind(nn.Linear(4, 4).parameters(), lr=lr, betas=(0.9, 0.99))
    with pytest.raises(
        ValueError,
        match=f"{kind.__name__} .*: its first step sets the attribute 'first'.*in __init__",
    ):
        TorchRule(optimizer)
    assert not optimizer.first


class _Table(Own):
    """Set up once, to what is the same whatever it finds."""

    def made(self) -> None:
        self.table: dict[str, torch.Tensor] = {}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if "it" not in self.table:
            self.table["it"] = torch.linspace(0, 1, 5)
        return float(self.table["it"][2])


def _warm_up(model: nn.Module, optimizer: Any) -> None:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for number in range(6):
        pass_back(model, number)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


class _AttributeOfParameter(Own):
    """Sets an attribute of each parameter by what that is."""

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if not hasattr(p, "fan"):
            p.fan = p.shape[-1]
        return float(p.fan**-0.5)


@pytest.mark.parametrize("kind", [_Table, _AttributeOfParameter])
def test_attribute_that_is_the_same_whatever_a_step_finds_is_taken(
    kind: type[Own], nvme: Path
) -> None:
    assert has_bits_of_plain(linears, kind, nvme, host_memory=WHOLE, train=_warm_up)


def test_optimizer_that_takes_one_set_of_options_alone_is_tried_with_that(nvme: Path) -> None:
    class _Fixed(_Table):
        def begin(self) -> None:
            assert all(group["lr"] == 0.01 for group in self.param_groups)

    TorchRule(_Fixed(linears().parameters()))


class _RateOfTheFirstGroup(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 1.0 + float(self.param_groups[0]["lr"] - group["lr"])


@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_rate_of_another_group_is_refused_also_where_all_are_the_same_at_first(lr: float) -> None:
    groups = [{"params": [p]} for p in nn.Linear(4, 4).parameters()]
    with pytest.raises(ValueError, match="two of them together"):
        TorchRule(_RateOfTheFirstGroup(groups, lr=lr))


class _Flag(Own):
    def made(self) -> None:
        self.is_ready = False

    def begin(self) -> None:
        if not self.is_ready:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["anchor"] = p.clone()
            self.is_ready = True

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        p.lerp_(self.state[p]["anchor"], 0.01)
        return 1.0


class _FillsGradients(Own):
    def begin(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        state = self.state[p]
        state["m"] = 0.9 * state.get("m", 0) + p.grad
        p.sub_(state["m"], alpha=0.01)
        return 0.0


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (_Flag, "its steps set 'is_ready', which each update finds as it was made"),
        (_FillsGradients, "it moves parameters that have no gradient.*let it skip them"),
    ],
)
def test_refusal_names_the_cause(kind: type[Own], cause: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} does not update .*{cause}"):
        TorchRule(kind(nn.Linear(4, 4).parameters()))


class _Draws(Own):
    def begin(self) -> None:
        self.drawn = random.random(), np.random.rand(), torch.rand(())


def test_trials_leave_random_states_and_draws_are_refused_by_name() -> None:
    parameters = [*nn.Linear(4, 4).parameters()]
    before: Any = random.getstate(), torch.get_rng_state(), np.random.get_state()
    with pytest.raises(ValueError, match=r"_Draws .*: it draws random numbers in its steps"):
        TorchRule(_Draws(parameters))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    now: Any = np.random.get_state()
    assert now[2] == before[2][2]


class _WidthInGroup(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(group.setdefault("width", p.shape[0]) ** -0.5)


def test_group_that_notes_what_its_parameter_is_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_WidthInGroup .*what it keeps in a group"):
        TorchRule(_WidthInGroup([{"params": [p]} for p in nn.Linear(4, 4).parameters()]))


class _CountsInClass(Own):
    steps = 0
    rates: tuple[float, ...] = ()

    def begin(self) -> None:
        _CountsInClass.steps += 1


def test_count_in_a_class_is_refused_by_name_and_as_it_was() -> None:
    with pytest.raises(ValueError, match="its steps set 'steps' in its class"):
        TorchRule(_CountsInClass(nn.Linear(4, 4).parameters()))
    assert _CountsInClass.steps == 0
