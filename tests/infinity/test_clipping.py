"""Clipping and the loss scale are of the gradients that are there, as in plain PyTorch: what comes
after them is left alone.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.proof import by_turns
from tests.support.training import WHOLE, least_budget, values_of

Clip = Callable[[float], torch.Tensor]
Program = Callable[[Stack, Clip, Callable[[torch.Tensor], torch.Tensor | None]], None]
MAX_NORM = 0.01


def _make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _backward(model: Stack, batch: int) -> None:
    vector_loss(model, batch).backward()


def _skip(model: Stack, clip: Clip, _: object) -> None:
    _backward(model, 0)
    clip(MAX_NORM)
    model.zero_grad()
    _backward(model, 1)


def _clear_each(model: Stack, clip: Clip, _: object) -> None:
    _backward(model, 0)
    clip(MAX_NORM)
    for parameter in model.parameters():
        parameter.grad = None
    _backward(model, 1)


def _accumulate(model: Stack, clip: Clip, _: object) -> None:
    _backward(model, 0)
    clip(MAX_NORM)
    _backward(model, 1)


def _accumulate_and_clip(model: Stack, clip: Clip, _: object) -> None:
    _accumulate(model, clip, _)
    clip(MAX_NORM)


def _assign(model: Stack, clip: Clip, _: object) -> None:
    _backward(model, 0)
    clip(MAX_NORM)
    model.layer(0).weight.grad = torch.full((256, 256), 1e-3)


def _read_and_assign(
    model: Stack, clip: Clip, read: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    _backward(model, 0)
    clip(MAX_NORM)
    gradient = read(model.layer(0).weight)
    assert gradient is not None
    model.layer(0).weight.grad = -gradient


def _clip_nothing(model: Stack, clip: Clip, _: object) -> None:
    clip(1e-8)
    _backward(model, 0)


PROGRAMS: dict[str, Program] = {
    "zero_grad": _skip,
    "each None": _clear_each,
    "accumulate": _accumulate,
    "accumulate, clip": _accumulate_and_clip,
    "assign": _assign,
    "read, assign": _read_and_assign,
    "clip nothing": _clip_nothing,
}


@pytest.mark.parametrize(("name", "budget"), by_turns(PROGRAMS, ["whole", "least"]))
def test_gradients_after_clipping_train_as_in_plain_torch(
    name: str, budget: str, nvme: Path
) -> None:
    program = PROGRAMS[name]
    plain = seeded(Stack)
    optimizer = _make_sgd(list(plain.parameters()))
    program(
        plain, lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm), lambda p: p.grad
    )
    optimizer.step()

    model = seeded(Stack)
    least = least_budget(Stack, nvme, optimizer=_make_sgd)
    host_memory = WHOLE if budget == "whole" else least
    with infinity.offload(model, nvme, optimizer=_make_sgd, host_memory=host_memory) as offloaded:
        program(model, offloaded.clip_grad_norm_, offloaded.gradient)
        offloaded.step()
    expected = values_of(plain)
    for key, value in values_of(model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-7)


def test_the_loss_scale_goes_with_the_last_gradient(nvme: Path) -> None:
    with infinity.offload(
        seeded(Stack), nvme, host_memory=WHOLE, compute_dtype=torch.float16
    ) as offloaded:
        model = offloaded.model
        assert isinstance(model, Stack)
        offloaded.backward(vector_loss(model, 0))
        model.zero_grad()
        weight = model.layer(0).weight
        weight.grad = torch.full((256, 256), 0.5, dtype=torch.float16)
        offloaded.step()
        assert offloaded.grad_norm.item() == pytest.approx(0.5 * 256)


def test_scaled_gradients_after_plain_ones_were_cleared_are_scaled(nvme: Path) -> None:
    with infinity.offload(
        seeded(Stack), nvme, host_memory=WHOLE, compute_dtype=torch.float16
    ) as offloaded:
        model = offloaded.model
        assert isinstance(model, Stack)
        vector_loss(model, 0).backward()
        plain = offloaded.gradient(model.layer(0).weight)
        model.zero_grad()
        offloaded.backward(vector_loss(model, 0))
        scaled = offloaded.gradient(model.layer(0).weight)
        assert plain is not None
        assert scaled is not None
        assert scaled.norm() > 1e3 * plain.norm()
