"""Parameters that an optimizer tells apart by what its groups or its class have of them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.own_optimizers import Own, linears


class _InGroup(Own):
    def made(self) -> None:
        for group in self.param_groups:
            group["mark"] = self.mark_of(group["params"][1])

    def mark_of(self, p: Any) -> Any:
        """What of a parameter is in its group."""


class _Table(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return {id(p): 0.1}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(group["mark"].get(id(p), 1.0))


class _TableOfParameters(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return {p: 0.1}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(group["mark"].get(p, 1.0))


class _Itself(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return p

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if p is group["mark"] else 1.0


class _Number(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return id(p)

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if id(p) == group["mark"] else 1.0


class _Address(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return [p.data_ptr()]

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if p.data_ptr() in group["mark"] else 1.0


class _Function(_InGroup):
    def mark_of(self, p: Any) -> Any:
        return lambda q: p is q

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 0.1 if group["mark"](p) else 1.0


@pytest.mark.parametrize(
    "kind", [_Table, _TableOfParameters, _Itself, _Number, _Address, _Function]
)
def test_group_that_leads_to_a_parameter_is_refused_by_name(kind: type[Own]) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} .*: 'mark' of a group has parameters.*p\.lr_scale"
    ):
        TorchRule(kind(linears().parameters()))


class _TableInClass(Own):
    rates: dict[int, float]

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return self.rates.get(id(p), 1.0)


@pytest.mark.parametrize("is_base", [True, False])
def test_class_that_leads_to_a_parameter_is_refused_by_name(is_base: bool) -> None:
    model = linears()
    base = type("_Base", (_TableInClass,), {"rates": {id(model[1].weight): 0.1}})
    kind: Any = type("_Kind", (base,), {}) if is_base else base
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} .*: 'rates' of the class _Base .*p\.lr_scale"
    ):
        TorchRule(kind(model.parameters()))


class _Plain(Own):
    table: ClassVar = {"wide": 1.0, "narrow": 0.5}
    lock = threading.Lock()

    def made(self) -> None:
        for group in self.param_groups:
            group["rates"] = {"wide": torch.tensor(1.0), "by": lambda p: p.dim()}

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        with self.lock:
            wide = group["rates"]["by"](p) > 1
        return float(group["rates"]["wide"]) if wide else self.table["narrow"]


def test_plain_tables_and_functions_in_groups_and_classes_are_taken() -> None:
    TorchRule(_Plain(linears().parameters()))


class _ZippedRates(Own):
    def made(self) -> None:
        self.rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, rate in zip(self.param_groups, self.rates, strict=False):
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * rate)


def test_rates_beside_the_groups_are_refused_with_that_cause() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters(), "lr": 0.1 * at} for at, layer in enumerate(model, 1)]
    with pytest.raises(ValueError, match=r"_ZippedRates .*: .* goes by another group than its own"):
        TorchRule(_ZippedRates(groups))
