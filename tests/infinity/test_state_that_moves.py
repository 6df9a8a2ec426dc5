"""Optimizers that hand a state tensor from one name to another, or have two names for one: what is
kept of a parameter is what they would have in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.own_optimizers import Each
from tests.support.training import WHOLE, least_budget, same_bits

WIDTH = 144
STEPS = 6


class _Rotated(Each):
    """The last three gradients, as Adams-Bashforth has them."""

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if not state:
            state.update(g1=torch.zeros_like(p), g2=torch.zeros_like(p), g3=torch.zeros_like(p))
        p.sub_(p.grad + 0.5 * state["g1"] - 0.3 * state["g2"] + 0.1 * state["g3"], alpha=0.1)
        state["g3"], state["g2"], state["g1"] = state["g2"], state["g1"], p.grad.clone()


class _Swapped(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if not state:
            state.update(a=torch.zeros_like(p), b=torch.ones_like(p))
        state["a"].add_(p.grad)
        p.sub_(p.grad + 0.1 * state["b"], alpha=0.1)
        state["a"], state["b"] = state["b"], state["a"]


class _WithTheWeights(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if not state:
            state.update(other=torch.full_like(p, 0.01))
        p.sub_(p.grad, alpha=0.1)
        state["other"], p.data = p.data, state["other"]


class _WithTheWeightsBefore(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        before = state.get("before", p.detach())
        after = p - 0.1 * p.grad + 0.5 * (p - before)
        state["before"], p.data = p.detach(), after


class _TwoNames(Each):
    """One tensor, which is changed by one name and used by the other."""

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if not state:
            state.update(used=torch.zeros_like(p))
            state["added_to"] = state["used"]
            state.update(count=torch.zeros(1))
            state["counted"] = state["count"]
        state["added_to"].mul_(0.9).add_(p.grad)
        state["count"] += 1
        p.sub_(state["used"] / state["counted"], alpha=0.1)


class _NameOfTheWeights(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        state.setdefault("weights", p.detach())
        p.sub_(p.grad + 0.1 * state["weights"], alpha=0.1)


class _InAList(Each):
    """A tensor of the state in a list, which that of the name has left."""

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        before = state.setdefault("average", torch.zeros_like(p))
        state["average"] = before.lerp(p.grad, 0.1)
        history = state.setdefault("history", [])
        p.sub_(state["average"] + sum(history, torch.zeros(())), alpha=0.1)
        history.append(before)
        del history[:-2]


KINDS = [
    *(_Rotated, _Swapped, _WithTheWeights, _WithTheWeightsBefore),
    *(_TwoNames, _NameOfTheWeights, _InAList),
]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _backward(model: nn.Module, number: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()


def _in_memory(kind: type[Each]) -> dict[str, torch.Tensor]:
    model = seeded(_model)
    optimizer = kind(model.parameters())
    for number in range(STEPS):
        _backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_goes_to_another_name_has_the_bits_of_plain_torch(
    kind: type[Each], nvme: Path, tmp_path: Path
) -> None:
    expected = _in_memory(kind)
    for host_memory in (WHOLE, least_budget(_model, nvme, optimizer=kind)):
        model = seeded(_model)
        with infinity.offload(model, nvme, optimizer=kind, host_memory=host_memory) as offloaded:
            for number in range(STEPS):
                _backward(model, number)
                offloaded.step()
                if number == STEPS // 2:
                    offloaded.save(tmp_path / f"{host_memory}")
        assert all(same_bits(p, expected[name]) for name, p in model.named_parameters())
        again = seeded(_model, 2)
        with infinity.offload(again, nvme, optimizer=kind, host_memory=host_memory) as offloaded:
            offloaded.load(tmp_path / f"{host_memory}")
            for number in range(STEPS // 2 + 1, STEPS):
                _backward(again, number)
                offloaded.step()
        assert all(same_bits(p, expected[name]) for name, p in again.named_parameters())


class _InOneBuffer(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if not state:
            both = torch.zeros(2, *p.shape)
            state.update(both=both, average=both[0], square=both[1])
        state["average"].lerp_(p.grad, 0.1)
        state["square"].lerp_(p.grad**2, 0.1)
        p.sub_(state["both"].sum(0), alpha=0.1)


def test_state_in_a_part_of_other_state_is_refused_by_name(nvme: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"'average' in a part of the memory of its state 'both'"),
        infinity.offload(_model(), nvme, optimizer=_InOneBuffer),
    ):
        pass
