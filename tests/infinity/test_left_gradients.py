"""Gradients that are there as a block begins or ends: stepped with, given back, or named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import LowStack as Stack
from tests.support.models import low_vector_loss as vector_loss
from tests.support.models import seeded
from tests.support.training import same_bits, values_of

BUDGET = "64MiB"
ENDS = "ends with gradients"


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = [(gradient, _gradients(other)[name]) for name, gradient in _gradients(one).items()]
    return all(
        a is b is None or (a is not None and b is not None and same_bits(a, b)) for a, b in pairs
    )


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        vector_loss(model, 9)


def _backward(model: nn.Module) -> None:
    vector_loss(model, 5).backward()


def _clear(model: nn.Module) -> None:
    model.zero_grad()


def _clear_one(model: nn.Module) -> None:
    model.get_parameter("layers.0.weight").grad = None


def _change_one(model: nn.Module) -> None:
    gradient = model.get_parameter("layers.0.weight").grad
    assert gradient is not None
    gradient.mul_(2)


@pytest.mark.parametrize("act", [_evaluate, _backward, _clear, _clear_one, _change_one])
def test_an_inference_block_leaves_gradients_as_they_would_be_in_memory(
    act: Callable[[nn.Module], None], nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = seeded(Stack), seeded(Stack)
    for each in (model, plain):
        each.layer(3).weight.requires_grad_(False)
        each.layer(3).weight.grad = torch.ones_like(each.layer(3).weight)
        vector_loss(each, 0).backward()
    before = _gradients(model)
    with infinity.offload(model, nvme, optimizer=None, host_memory=BUDGET):
        act(model)
    if act is _clear:  # in the block those of frozen parameters are out of its reach
        plain.layer(3).weight.grad = None
        model.layer(3).weight.grad = None
    act(plain)
    assert _same(model, plain)
    for name, gradient in _gradients(model).items():
        assert gradient is None or gradient is before[name]
    assert ENDS not in caplog.text


def test_an_accumulation_goes_on_after_an_inference_block(nvme: Path) -> None:
    trained = []
    for is_offloaded in (True, False):
        model = seeded(Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        vector_loss(model, 0).backward()
        if is_offloaded:
            with infinity.offload(model, nvme, optimizer=None, host_memory=BUDGET):
                _evaluate(model)
        vector_loss(model, 1).backward()
        optimizer.step()
        trained.append(values_of(model))
    assert all(same_bits(value, trained[1][name]) for name, value in trained[0].items())


@pytest.mark.parametrize("optimizer", [infinity.AdamW(), None])
def test_gradients_since_the_last_step_are_named_as_the_block_ends(
    optimizer: infinity.AdamW | None, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Stack)
    count = len(list(model.parameters()))
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(model, nvme, optimizer=optimizer, host_memory=BUDGET),
    ):
        vector_loss(model, 1).backward()
        model.zero_grad(set_to_none=False)
        vector_loss(model, 0).backward()
    assert caplog.text.count(f"{ENDS} that {count} parameters (layers.0.weight first)") == 1
    assert ("take that step" in caplog.text) == (optimizer is not None)
    assert all(gradient is None for gradient in _gradients(model).values())


@pytest.mark.parametrize("how", ["step", "optimizer", "cleared", "zeroed", "error"])
def test_nothing_is_named_where_no_gradient_is_left_or_an_error_is_on_its_way(
    how: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Stack)

    def run() -> None:
        with infinity.offload(model, nvme, host_memory=BUDGET) as offloaded:
            vector_loss(model, 0).backward()
            if how == "step":
                offloaded.step()
            elif how == "optimizer":
                offloaded.optimizer.step()
            elif how == "cleared":
                model.zero_grad()
            elif how == "zeroed":
                model.zero_grad(set_to_none=False)
            else:
                raise KeyError

    if how == "error":
        with pytest.raises(KeyError):
            run()
    else:
        run()
    assert ENDS not in caplog.text


def test_gradients_of_frozen_parameters_come_back_from_a_training_block(nvme: Path) -> None:
    model = seeded(Stack)
    frozen = model.layer(3).weight.requires_grad_(False)
    frozen.grad = gradient = torch.ones_like(frozen)
    with infinity.offload(model, nvme, host_memory=BUDGET) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
    assert model.layer(3).weight.grad is gradient
    assert model.layer(0).weight.grad is None
