"""State that an optimizer has when a factory gives it: what its class makes anew of a parameter and
options is taken, any other is refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.own_optimizers import Own, pass_back

WIDTH = 4
Make = Callable[[Any], torch.optim.Optimizer]


class _Sums(Own):
    """Has sums of squares from the beginning on."""

    def __init__(self, params: Any, lr: float = 1e-2, start: float = 0.5, **others: Any) -> None:
        self.others = others
        super().__init__(params, lr=lr, start=start)

    def made(self) -> None:
        for group in self.param_groups:
            for position, p in enumerate(group["params"]):
                self.state[p] = {"sum": torch.full_like(p, self.start_of(p, group, position))}

    def start_of(self, p: Any, group: dict[str, Any], position: int) -> float:
        return float(group["start"])

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        state = self.state[p]
        state["sum"] += p.grad.square()
        return 1.0 / (1.0 + float(state["sum"].mean()))


class _ByArgument(_Sums):
    def start_of(self, p: Any, group: dict[str, Any], position: int) -> float:
        return float(self.others.get("initial", 0.0))


class _ByRequired(_Sums):
    def __init__(self, params: Any, first: float) -> None:
        super().__init__(params, start=first)


class _ByPosition(_Sums):
    def start_of(self, p: Any, group: dict[str, Any], position: int) -> float:
        return float(position)


class _ByChance(_Sums):
    def start_of(self, p: Any, group: dict[str, Any], position: int) -> float:
        return random.random()


class _ByRate(_Sums):
    def start_of(self, p: Any, group: dict[str, Any], position: int) -> float:
        return float(group["lr"])


class _ByMuon(_Sums):
    """Without ``params`` first."""

    def __init__(self, lr: float = 1e-2, muon_params: Any = ()) -> None:
        super().__init__(muon_params, lr)


def _with_a_mark(parameters: Any) -> torch.optim.Optimizer:
    optimizer = Own(parameters)
    optimizer.state[optimizer.param_groups[0]["params"][1]]["emb"] = True
    return optimizer


def _with_state_of_all(parameters: Any) -> torch.optim.Optimizer:
    optimizer, everyone = Own(parameters), cast(torch.Tensor, "all")
    optimizer.state[everyone]["scale"] = 0.5
    return optimizer


def _warm(kind: Any, parameters: Any, **options: Any) -> Any:
    """With the state of an earlier run."""
    model = nn.Linear(WIDTH, WIDTH)
    earlier = kind(model.parameters(), **options)
    pass_back(model, 0, WIDTH)
    earlier.step()
    optimizer = kind(parameters, **options)
    optimizer.load_state_dict(earlier.state_dict())
    return optimizer


REFUSED: dict[str, tuple[Make, str]] = {
    "SGD": (
        lambda ps: _warm(torch.optim.SGD, ps, lr=0.1, momentum=0.9),
        r"\(4, 4\) \('momentum_buffer'\) is not",
    ),
    "Adam": (lambda ps: _warm(torch.optim.Adam, ps), "is not what is made anew"),
    "Adagrad": (lambda ps: _warm(torch.optim.Adagrad, ps), r"\('step', 'sum'\) is not"),
    "AdamW": (lambda ps: _warm(torch.optim.AdamW, ps), "cannot be made anew .*TypeError"),
    "_Sums": (lambda ps: _warm(_Sums, ps), r"\('sum'\) is not what is made anew"),
    "_ByArgument": (partial(_ByArgument, initial=0.1), "is not what is made anew"),
    "_ByRequired": (partial(_ByRequired, first=0.1), "cannot be made anew .*TypeError"),
    "_ByPosition": (_ByPosition, r"\(4,\) \('sum'\) is not what is made anew"),
    "_ByChance": (_ByChance, "is not what is made anew"),
    "_ByRate": (_ByRate, "goes by the rate"),
    "_ByMuon": (lambda ps: _ByMuon(muon_params=ps), "cannot be made anew .*TypeError"),
    "Own mark": (_with_a_mark, r"\(4,\) \('emb'\) is not what is made anew"),
    "Own all": (_with_state_of_all, "what it has by 'all' is no parameter's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_the_class_does_not_make_anew_is_refused_by_name(name: str) -> None:
    make, what = REFUSED[name]
    optimizer = make(nn.Linear(WIDTH, WIDTH).parameters())
    before = random.getstate()
    with pytest.raises(ValueError, match=f"^{name.split()[0]} has state .*{what}.*if not state"):
        TorchRule(optimizer)
    assert random.getstate() == before


class _Anchored(_Sums):
    def made(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"anchor": p.detach().clone(), "wide": p.dim() > 1}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        p.lerp_(self.state[p]["anchor"], 0.5 if self.state[p]["wide"] else 0.1)
        return 1.0


TAKEN: dict[str, Make] = {
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "Sums": partial(_Sums, start=0.25),
    "groups": lambda ps: _Sums([{"params": [p], "start": 0.1 * at} for at, p in enumerate(ps)]),
    "Anchored": _Anchored,
    "named": lambda ps: _Sums([(str(at), p) for at, p in enumerate(ps)]),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_that_the_class_makes_anew_is_taken(name: str, device: str) -> None:
    optimizer = TAKEN[name](nn.Linear(WIDTH, WIDTH, device=device).parameters())
    TorchRule(optimizer)
    assert not optimizer.state


def test_state_that_is_empty_needs_no_class_to_make_it_anew() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(WIDTH, WIDTH).parameters())
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]]
    TorchRule(optimizer)
