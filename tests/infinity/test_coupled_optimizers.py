"""What optimizers keep beside groups and the state of each parameter, and what couples parameters
late: refused by name before anything is begun, and taken where no step needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.models import seeded
from tests.support.training import WHOLE, same_bits


class _Sgd(torch.optim.Optimizer):
    """``begin`` gives a factor for the step, ``one`` updates a parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.made()

    def made(self) -> None:
        """What there is from the beginning on."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        factor = self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group["lr"] * factor)
            self.end(group)

    def begin(self) -> float:
        return 1.0

    def one(self, p: Any, rate: float) -> None:
        p.sub_(p.grad, alpha=rate)

    def end(self, group: dict[str, Any]) -> None:
        """After the parameters of ``group``."""

    @property
    def gradients(self) -> list[torch.Tensor]:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        return [gradient for gradient in every if gradient is not None]


class _CountsInAttribute(_Sgd):
    def made(self) -> None:
        self.steps = 0

    def begin(self) -> float:
        self.steps += 1
        return 0.5 if self.steps % 50 == 0 else 1.0


class _CountsInTensor(_Sgd):
    def made(self) -> None:
        self.steps = torch.zeros(())

    def begin(self) -> float:
        self.steps += 1
        return 1.0 if self.steps < 60 else 0.1


class _CountsInDict(_Sgd):
    def made(self) -> None:
        self.kept = {"steps": 0}

    def begin(self) -> float:
        self.kept["steps"] += 1
        return 1.0 if self.kept["steps"] < 60 else 0.1


class _CountsInState(_Sgd):
    def begin(self) -> float:
        kept: Any = self.state["all"]  # type: ignore[index]
        kept["steps"] = kept.get("steps", 0) + 1
        return 0.5 if kept["steps"] % 50 == 0 else 1.0


class _CountsInParameter(_Sgd):
    def one(self, p: Any, rate: float) -> None:
        p.steps = getattr(p, "steps", 0) + 1
        super().one(p, rate if p.steps < 60 else 0.1 * rate)


class _ById(_Sgd):
    def made(self) -> None:
        self.slow = {id(p) for group in self.param_groups for p in group["params"] if p.dim() < 2}

    def one(self, p: Any, rate: float) -> None:
        super().one(p, 0.1 * rate if id(p) in self.slow else rate)


class _ByParameter(_Sgd):
    def made(self) -> None:
        self.rates = {p: 0.5 for group in self.param_groups for p in group["params"]}

    def one(self, p: Any, rate: float) -> None:
        super().one(p, self.rates.get(p, 1.0) * rate)


class _SkipsUnlessFinite(_Sgd):
    def begin(self) -> float:
        return float(all(bool(torch.isfinite(gradient).all()) for gradient in self.gradients))

    def one(self, p: Any, rate: float) -> None:
        if rate:
            super().one(p, rate)


class _ClipsRarely(_Sgd):
    def begin(self) -> float:
        norm = float(torch.stack([gradient.norm() for gradient in self.gradients]).norm())
        return min(1.0, 1e5 / norm) if norm else 1.0


class _SlowsByOne(_Sgd):
    """By the count of the first parameter of a group."""

    def one(self, p: Any, rate: float) -> None:
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        super().one(p, rate)

    def end(self, group: dict[str, Any]) -> None:
        if group["params"] and self.state[group["params"][0]].get("steps", 0) % 20 == 19:
            group["lr"] *= 0.5


class _LooksAtAllLate(_Sgd):
    def end(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] >= 60:
            group["lr"] = 1.0 / (1 + max(float(gradient.max()) for gradient in self.gradients))


REFUSED: dict[type[_Sgd], str] = {
    _CountsInAttribute: "from step to step in its attribute 'steps'",
    _CountsInTensor: "from step to step in its attribute 'steps'",
    _CountsInDict: "from step to step in its attribute 'kept'",
    _CountsInState: "it keeps state by 'all'",
    _CountsInParameter: "in the attribute 'steps' of parameters",
    _ById: "its steps use the attribute 'slow', which has parameters, or what leads to them",
    _ByParameter: "its steps use the attribute 'rates', which has parameters",
    _SkipsUnlessFinite: "two of them together",
    _ClipsRarely: "two of them together",
    _SlowsByOne: "two of them together",
    _LooksAtAllLate: "two of them together",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizer_that_couples_parameters_or_steps_late_is_refused(kind: type[_Sgd]) -> None:
    with pytest.raises(
        ValueError,
        match=f"{kind.__name__} does not update every parameter by itself: .*{REFUSED[kind]}",
    ):
        TorchRule(kind(nn.Linear(4, 4).parameters()))


def test_counts_of_a_refused_optimizer_are_as_they_were() -> None:
    optimizer = _CountsInTensor(nn.Linear(4, 4).parameters())
    with pytest.raises(ValueError, match="'steps'"):
        TorchRule(optimizer)
    assert not optimizer.steps


class _ComputesAnew(_Sgd):
    def begin(self) -> float:
        self.lengths = [gradient.numel() for gradient in self.gradients]
        return 1.0

    def one(self, p: Any, rate: float) -> None:
        super().one(p, rate if p.numel() in self.lengths else 0.0)


class _SetsUpOnce(_Sgd):
    def made(self) -> None:
        self.is_ready = False
        self.table: torch.Tensor | None = None

    def begin(self) -> float:
        if not self.is_ready:
            self.table = torch.linspace(0, 1, 5)
            self.is_ready = True
        assert self.table is not None
        return float(self.table[2])


class _HasWhatNoStepNeeds(_Sgd):
    def made(self) -> None:
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)
        self.names = {p: str(at) for at, p in enumerate(self.param_groups[0]["params"])}
        self.itself = [self]


class _PeriodInGroup(_Sgd):
    def end(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] % 3 == 0:
            group["lr"] *= 0.5


class _PeriodInState(_Sgd):
    """Looks ahead every third step."""

    def one(self, p: Any, rate: float) -> None:
        state = self.state[p]
        if not state:
            state.update(steps=torch.zeros(()), slow=p.detach().clone())
        state["steps"] += 1
        super().one(p, rate)
        if state["steps"] % 3 == 0:
            p.copy_(state["slow"].lerp_(p, 0.5))


class _CountsInPlaceInGroup(_Sgd):
    def begin(self) -> float:
        for group in self.param_groups:
            group.setdefault("steps", torch.zeros(()))
            group["steps"] += 1
        return 1.0 / float(self.param_groups[0]["steps"])


class _HasArraysAndAModel(_Sgd):
    def made(self) -> None:
        self.rates = np.linspace(1.0, 0.5, 5)
        self.tables = {"rates": [np.ones(3), np.zeros((2, 2))]}
        self.teacher = nn.Linear(24, 24)

    def begin(self) -> float:
        return float(self.rates[1])


TAKEN = [
    *(_ComputesAnew, _SetsUpOnce, _HasWhatNoStepNeeds, _PeriodInGroup, _PeriodInState),
    *(_CountsInPlaceInGroup, _HasArraysAndAModel),
]


@pytest.mark.parametrize("kind", TAKEN)
def test_optimizer_that_keeps_nothing_of_all_is_taken(kind: type[_Sgd], nvme: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))

    ours, plain = seeded(model), seeded(model)
    optimizer = kind(plain.parameters())
    with infinity.offload(ours, nvme, optimizer=kind, host_memory=WHOLE) as offloaded:
        for number in range(7):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
            for trained in (ours, plain):
                trained(x).square().sum().backward()
            offloaded.step()
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    assert all(same_bits(p, expected[name]) for name, p in ours.named_parameters())


def test_trials_have_the_tensors_of_a_model_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = _HasArraysAndAModel([nn.Parameter(torch.ones(8, 4))])
    own = {id(p) for p in optimizer.teacher.parameters()}
    copied: list[int] = []
    deepcopy = torch.Tensor.__deepcopy__

    def counted(tensor: torch.Tensor, memo: Any) -> Any:
        copied.append(id(tensor))
        return deepcopy(tensor, memo)

    monkeypatch.setattr(torch.Tensor, "__deepcopy__", counted)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    TorchRule(optimizer)
    assert not own & {*copied}
