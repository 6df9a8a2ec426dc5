"""What ``requires_grad`` is while the model is offloaded: set, read back and put back as in memory.
A gradient that arrives where none can be kept is refused, and nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.proof import by_turns
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of


def _half_frozen() -> Stack:
    model = seeded(Stack)
    for index in range(0, 12, 2):
        model.layer(index).requires_grad_(False)
    return model


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_came_frozen_can_be_flagged_and_used_without_gradients(
    nvme: Path, is_whole: bool
) -> None:
    """As adapters are, of which one is trained and another one is looked at between."""
    plain, model = _half_frozen(), _half_frozen()
    optimizer = _adamw([p for p in plain.parameters() if p.requires_grad])
    host_memory = WHOLE if is_whole else least_budget(_half_frozen, nvme, optimizer=_adamw)
    with infinity.offload(model, nvme, optimizer=_adamw, host_memory=host_memory) as offloaded:
        for step in range(4):
            losses = []
            for each in (plain, model):
                each.layer(0).requires_grad_(True)
                each.layer(1).weight.requires_grad = False
                assert each.layer(0).weight.requires_grad
                assert not each.layer(1).weight.requires_grad
                with torch.no_grad():
                    looked = vector_loss(each, step)
                each.layer(1).weight.requires_grad = True
                each.layer(0).requires_grad_(False)
                loss = vector_loss(each, step)
                loss.backward()
                losses.append((looked.item(), loss.item()))
            optimizer.step()
            optimizer.zero_grad()
            offloaded.step()
            assert losses[0] == losses[1]
    assert same_values(values_of(plain), values_of(model))


@pytest.mark.parametrize("thaw", ["model", "layer", "flag"])
def test_gradient_of_what_came_frozen_is_refused_where_it_arrives(nvme: Path, thaw: str) -> None:
    plain, model = _half_frozen(), _half_frozen()
    optimizer = _adamw([p for p in plain.parameters() if p.requires_grad])
    with infinity.offload(model, nvme, optimizer=_adamw) as offloaded:
        if thaw == "model":
            model.requires_grad_()
        elif thaw == "layer":
            model.layer(10).requires_grad_()
        else:
            model.layer(10).weight.requires_grad = True
        vector_loss(model, 0)  # nobody asks for gradients
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"layers\.10\.\w+ was frozen .* before the blo"):
                vector_loss(model, 0).backward()
            with pytest.raises(RuntimeError, match=r"gradient of layers\.10\.\w+ was lost"):
                offloaded.step()
            offloaded.optimizer.zero_grad()
        for index in range(0, 12, 2):
            model.layer(index).requires_grad_(False)
        for step in range(3):
            for each in (plain, model):
                vector_loss(each, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            offloaded.step()
        model.layer(10).requires_grad_()
    assert same_values(values_of(plain), values_of(model))
    assert model.layer(10).weight.requires_grad
    vector_loss(model, 0).backward()
    assert model.layer(10).weight.grad is not None


def test_gradient_that_passed_by_the_flag_is_refused_by_the_step(nvme: Path) -> None:
    """Set by torch's own function, which no class sees."""
    model = _half_frozen()
    with infinity.offload(model, nvme) as offloaded:
        torch.Tensor.requires_grad_(model.layer(10).weight)
        vector_loss(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"layers\.10\.weight was frozen"):
            offloaded.step()
        offloaded.optimizer.zero_grad()
        model.layer(10).weight.requires_grad = False
        vector_loss(model, 0).backward()
        offloaded.step()


def test_gradients_by_what_came_frozen_are_given_to_who_asks(nvme: Path) -> None:
    plain, model = _half_frozen(), _half_frozen()
    with infinity.offload(model, nvme) as offloaded:
        found = []
        for each in (plain, model):
            weight = each.layer(10).weight.requires_grad_()
            found.append(torch.autograd.grad(vector_loss(each, 0), [weight])[0])
        assert same_bits(*found)
        model.layer(10).weight.requires_grad_(False)
        vector_loss(model, 0).backward()
        offloaded.step()


def _freeze_between_forward_and_backward(model: Stack, step: int) -> None:
    loss = vector_loss(model, step)
    model.layer(3).requires_grad_(step % 2 == 0)
    loss.backward()


def _freeze_between_accumulations(model: Stack, step: int) -> None:
    vector_loss(model, step).backward()
    model.layer(3).requires_grad_(False)
    vector_loss(model, step + 50).backward()
    model.layer(3).requires_grad_(step % 3 != 1)


def _freeze_for_a_while(model: Stack, step: int) -> None:
    model.layer(3).requires_grad_(step not in (2, 3))
    model.layer(11).requires_grad_(step < 2 or step > 4)
    vector_loss(model, step).backward()


def _freeze_before_the_step(model: Stack, step: int) -> None:
    model.requires_grad_(True)
    vector_loss(model, step).backward()
    model.requires_grad_(False)
    model.layer(5).requires_grad_(True)


PATTERNS: dict[str, Callable[[Stack, int], None]] = {
    "between forward and backward": _freeze_between_forward_and_backward,
    "between accumulations": _freeze_between_accumulations,
    "for a while": _freeze_for_a_while,
    "before the step": _freeze_before_the_step,
}


@pytest.mark.parametrize(("name", "is_whole"), by_turns(PATTERNS, [True, False]))
def test_freezing_for_a_while_is_what_it_is_in_memory(
    nvme: Path, name: str, is_whole: bool
) -> None:
    """Updates that begin before the step do not wait for gradients that will not come."""
    plain, model = seeded(Stack), seeded(Stack)
    optimizer = _adamw(plain.parameters())
    least = least_budget(lambda: seeded(Stack), nvme, optimizer=_adamw)
    host_memory = WHOLE if is_whole else least
    with infinity.offload(model, nvme, optimizer=_adamw, host_memory=host_memory) as offloaded:
        for step in range(7):
            for each in (plain, model):
                PATTERNS[name](each, step)
            ours, theirs = ([p.grad is None for p in each.parameters()] for each in (model, plain))
            assert ours == theirs
            optimizer.step()
            optimizer.zero_grad()
            offloaded.step()
        flags = [[p.requires_grad for p in each.parameters()] for each in (model, plain)]
        assert flags[0] == flags[1]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert same_values(values_of(plain), values_of(model))
