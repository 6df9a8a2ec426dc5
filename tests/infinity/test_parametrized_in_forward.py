"""A module that gives a weight a parametrization in forward and takes it off again, as PEFT does to
experts: the weight leaves its module and comes back to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import infinity
from tests.support.models import seeded, vectors
from tests.support.training import WHOLE, least_budget, same_values, values_of

WIDTH = 256


class _Added(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 16)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, "weight", _Added(self.up @ self.down))
        try:
            with parametrize.cached():
                result: torch.Tensor = self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return result


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adapted() for _ in range(6))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.tanh(
                checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            )
        return x


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("is_whole", [True, False])
def test_weight_that_is_parametrized_in_forward_trains_as_in_memory(
    nvme: Path, is_whole: bool, recomputes: bool
) -> None:
    plain, model = seeded(_Model), seeded(_Model)
    plain.recomputes = model.recomputes = recomputes
    optimizer = _adamw(plain.parameters())
    least = least_budget(lambda: seeded(_Model), nvme, optimizer=_adamw)
    host_memory = WHOLE if is_whole else least
    names = [name for name, _ in model.named_parameters()]
    with infinity.offload(model, nvme, optimizer=_adamw, host_memory=host_memory) as offloaded:
        for step in range(4):
            losses = [each(vectors(step)).square().mean() for each in (plain, model)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            offloaded.step()
        with pytest.raises(RuntimeError, match=r"base\.bias cannot be removed .* close\(\)"):
            del model.layers[0].get_submodule("base").bias
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert same_values(values_of(plain), values_of(model))
