"""Another policy in the place of that of ``swap.plan.eviction``, and no other change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from swap.plan import eviction
from tests.support.lru import Lru
from tests.support.models import Stack, vectors
from tests.support.training import Outcome, assert_same_runs, least_budget, train


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    """Of a batch whose saved tensors are large enough to be moved."""
    result: torch.Tensor = model(vectors(step, batch=768)).square().mean()
    return result


def _run(nvme: Path) -> Outcome:
    budget = least_budget(Stack, nvme, activations="nvme")
    return train(Stack, _loss, nvme, host_memory=budget, steps=4, activations="nvme")


def test_a_policy_by_past_uses_trains_to_the_same_bits(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    runs = {"by next uses": _run(nvme)}
    made: dict[str, list[Lru]] = {"for_weights": [], "for_saved": []}
    for name, policies in made.items():

        def make(*_: object, policies: list[Lru] = policies) -> Lru:
            policies.append(Lru())
            return policies[-1]

        monkeypatch.setattr(eviction, name, make)
    runs["by past uses"] = _run(nvme)
    assert_same_runs(runs)
    weights, saved = (policies[-1] for policies in made.values())
    assert weights.num_victims
    assert saved.num_victims
    assert saved.num_known < 16, "it is told what is gone"
