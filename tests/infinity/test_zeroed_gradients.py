"""Gradients that are set to zero instead of cleared: what the next pass leaves out is stepped with
zeros, as in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded, vectors
from tests.support.proof import by_turns
from tests.support.training import WHOLE, least_budget, same_values, values_of

WIDTH = 256
LR = 1e-2


def _make() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))


def _in_turns(model: nn.ModuleList, optimizer: torch.optim.Optimizer, passes: int) -> None:
    """All layers are used at first, then every other one."""
    for step in range(5):
        for part in range(passes):
            x = vectors(step * passes + part, width=WIDTH)
            for number, layer in enumerate(model):
                if step < 2 or (number + step) % 2:
                    x = x + torch.tanh(layer(x))
            (x.pow(2).mean() / passes).backward()
        optimizer.step()
        if step == 3:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _in_memory(
    passes: int, factory: Callable[[Any], torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    model = seeded(_make)
    _in_turns(model, factory(model.parameters()), passes)
    return values_of(model)


@pytest.mark.parametrize(("passes", "is_native"), by_turns([1, 2], [True, False]))
def test_zeroed_gradients_are_stepped_with_as_in_memory(
    is_native: bool, passes: int, nvme: Path
) -> None:
    factory = partial(torch.optim.AdamW, lr=LR, fused=True)
    expected = _in_memory(passes, factory)
    optimizer: Any = infinity.AdamW(lr=LR) if is_native else factory
    for host_memory in (WHOLE, least_budget(_make, nvme, optimizer=optimizer)):
        model = seeded(_make)
        with infinity.offload(
            model, nvme, optimizer=optimizer, host_memory=host_memory
        ) as offloaded:
            _in_turns(model, offloaded.optimizer, passes)
        assert same_values(values_of(model), expected)


def test_zeroing_what_has_no_gradient_gives_it_none(nvme: Path) -> None:
    model = seeded(_make)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        model[0](vectors(0, width=WIDTH)).sum().backward()
        offloaded.optimizer.zero_grad(set_to_none=False)
        assert [p.grad is None for p in model.parameters()] == [False] * 2 + [True] * 18
        offloaded.optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
