"""Gradients by parameters that are not in memory, as ``torch.autograd`` is asked for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import infinity
from swap.tiers import format_bytes
from tests.support.models import Stack, seeded, vector_loss
from tests.support.proof import matrix
from tests.support.training import least_budget, same_bits


def _grad_of_all(model: Any) -> Any:
    return torch.autograd.grad(vector_loss(model, 0), [*model.parameters()])


def _grad_of_one(model: Any) -> Any:
    return torch.autograd.grad(vector_loss(model, 0), model.layer(1).weight)


def _grad_of_unused(model: Any) -> Any:
    loss = model.layer(0)(torch.ones(2, 256)).sum()
    inputs = [*model.parameters()]
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def _grad_by_name(model: Any) -> Any:
    return [*torch.autograd.grad(vector_loss(model, 0), dict(model.named_parameters())).values()]


@pytest.mark.parametrize("ask", [_grad_of_all, _grad_of_one, _grad_of_unused, _grad_by_name])
def test_gradients_by_parameters_need_no_weights_in_place(
    ask: Callable[[Any], Any], nvme: Path
) -> None:
    expected = ask(seeded(Stack))
    model = seeded(Stack)
    least = least_budget(Stack, nvme, optimizer=None)
    with infinity.offload(model, nvme, optimizer=None, host_memory=least):
        found = ask(model)
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))


def test_an_operation_over_more_weights_than_fit_says_how_many(nvme: Path) -> None:
    model = seeded(Stack)
    least = least_budget(Stack, nvme)
    weights: list[torch.Tensor] = [each for each in model.parameters() if each.dim() == 2]
    with (
        infinity.offload(model, nvme, host_memory=least),
        pytest.raises(infinity.BudgetError) as error,
    ):
        torch.cat(weights)
    text = str(error.value)
    needed = format_bytes(sum(weight.nbytes for weight in weights))
    assert f"{needed} of weights are needed at once, by one operation over weights of" in text
    assert "more host_memory, or use these weights one after another" in text


def _saved_on_cpu(model: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return vector_loss(model, 0)


def _selectively_checkpointed(model: Any) -> Any:
    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(vector_loss, model, 0, use_reentrant=False, context_fn=contexts)


def _as_a_vector(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    return vector.square().sum() + vector_loss(model, 0)


def _refusal(ask: Callable[[Any], Any], model: Any) -> str:
    """Keeps nothing of the error but its text."""
    try:
        ask(model).backward()
    except infinity.BudgetError as error:
        return str(error)
    raise AssertionError("it fitted into the least budget")


def _layers() -> nn.Sequential:
    """None saves its output: torch keeps a graph for ever whose hooks return such a one as it is,
    as those of save_on_cpu do with a tensor that is there.
    """
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))


NEEDS_MORE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "saved on the CPU": (_saved_on_cpu, "save_on_cpu.*use activations= in place of such hooks"),
    "a vector of all": (_as_a_vector, "parameters_to_vector.*or use weights one after another"),
}


@pytest.mark.parametrize("name", matrix(NEEDS_MORE, usual=["saved on the CPU"]))
def test_training_goes_on_after_an_operation_that_needs_more_than_the_least(
    name: str, nvme: Path
) -> None:
    ask, remedy = NEEDS_MORE[name]
    least = least_budget(_layers, nvme)
    values = []
    for refused in (False, True):
        model = seeded(_layers)
        with infinity.offload(model, nvme, host_memory=least) as offloaded:
            for number in range(2):
                if refused and not number:
                    assert re.search(remedy, _refusal(ask, model))
                    model.zero_grad()
                vector_loss(model, number).backward()
                offloaded.step()
        values.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(same_bits, *values))


@pytest.mark.parametrize("ask", [_saved_on_cpu, _selectively_checkpointed, _as_a_vector])
def test_operations_over_weights_of_several_modules_give_the_bits_of_plain_torch(
    ask: Callable[[Any], Any], nvme: Path
) -> None:
    expected, model = seeded(Stack), seeded(Stack)
    ask(expected).backward()
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        ask(model).backward()
        for plain, parameter in zip(expected.parameters(), model.parameters(), strict=True):
            found = offloaded.gradient(parameter)
            assert found is not None
            assert plain.grad is not None
            assert same_bits(found, plain.grad)


def test_gradients_by_frozen_parameters_are_refused_as_by_torch(nvme: Path) -> None:
    model = seeded(Stack)
    model.layer(0).weight.requires_grad_(False)
    with (
        infinity.offload(model, nvme, host_memory="64MiB"),
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        _grad_of_all(model)


class Recomputed(nn.Module):
    """Reaches for weights beside its modules while it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.second.weight
        part = checkpoint(lambda y: torch.tanh(y @ second), self.first(x), use_reentrant=False)
        assert isinstance(part, torch.Tensor)
        return part.square().mean()


def test_a_backward_pass_into_some_parameters_recomputes_with_others(nvme: Path) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    plain = seeded(Recomputed)
    plain(x).backward(inputs=[plain.first.weight])
    model = seeded(Recomputed)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        model(x).backward(inputs=[model.first.weight])
        gradient = offloaded.gradient(model.first.weight)
        assert offloaded.gradient(model.second.weight) is None
    assert gradient is not None
    assert plain.first.weight.grad is not None
    assert same_bits(gradient, plain.first.weight.grad)
