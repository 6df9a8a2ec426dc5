"""Operations with several operands of an offloaded model: gradients, views of them, weights, views
of those, with and without tiles. The values are those of plain PyTorch in whatever order they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget, same_bits

WIDTH = 272
TILES = 275_000


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _backward(model: Any) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    return x


Operand = Callable[[Any], torch.Tensor]
ROWS: dict[str, Operand] = {
    "parameter": lambda m: m[0].bias,
    "gradient": lambda m: m[2].bias.grad,
    "view of a gradient": lambda m: m[0].weight.grad[0],
    "view of a parameter": lambda m: m[0].weight[1],
    "plain": lambda m: torch.ones(WIDTH),
}
MATRICES: dict[str, Operand] = {
    "parameter": lambda m: m[0].weight,
    "gradient": lambda m: m[2].weight.grad,
    "view of a gradient": lambda m: m[0].weight.grad.t(),
    "view of a parameter": lambda m: m[2].weight.t(),
    "plain": lambda m: torch.ones(WIDTH, WIDTH),
}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda a, b: a * b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "foreach": lambda a, b: torch._foreach_add([a, b], [b, a])[0],
}


def _results(model: Any) -> dict[object, torch.Tensor]:
    found: dict[object, torch.Tensor] = {}
    for operands in (ROWS, MATRICES):
        for one, other in itertools.product(operands, repeat=2):
            for name, operation in OPERATIONS.items():
                result = operation(operands[one](model), operands[other](model))
                found[name, one, other, operands is ROWS] = result.detach().clone()
    return found


@pytest.mark.parametrize("with_history", [True, False])
@pytest.mark.parametrize("tiles", [None, TILES])
def test_operations_over_gradients_and_weights_have_the_values_of_plain_torch(
    nvme: Path, tiles: int | None, with_history: bool
) -> None:
    plain, model = seeded(_model), seeded(_model)
    _backward(plain)
    with torch.set_grad_enabled(with_history):
        expected = _results(plain)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=tiles):
        _backward(model)
        with torch.set_grad_enabled(with_history):
            found = _results(model)
    for key, value in expected.items():
        # The sums of products in tiles are in another order.
        is_same = same_bits(value, found[key]) if tiles is None else value.allclose(found[key])
        assert is_same, key


def _flat(model: Any) -> list[torch.Tensor]:
    return [p.grad.flatten() for p in model.parameters()]


def test_all_gradients_are_put_together_and_changed_by_weights(nvme: Path) -> None:
    plain, model = seeded(_model), seeded(_model)
    _backward(plain)
    budget = least_budget(_model, nvme, max_parameter_bytes=TILES)
    with infinity.offload(model, nvme, host_memory=budget, max_parameter_bytes=TILES):
        _backward(model)
        models: tuple[Any, ...] = (plain, model)
        for each in models:
            with torch.no_grad():
                for layer in (each[0], each[2]):
                    layer.weight.grad.add_(layer.weight, alpha=0.1)
                    layer.bias.grad.copy_(layer.bias)
        together = torch.cat(_flat(model))
    expected = torch.cat(_flat(plain))
    assert together.sort().values.allclose(expected.sort().values, atol=1e-6)


def _nodes(model: nn.Module) -> list[Any]:
    views = [p.expand_as(p).grad_fn for p in model.parameters()]
    return [view.next_functions[0][0] for view in views if view is not None]


def test_hooks_on_the_nodes_that_accumulate_are_called_once_a_pass(nvme: Path) -> None:
    model = seeded(_model)
    calls: list[int] = []
    budget = least_budget(_model, nvme)
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        nodes = _nodes(model)
        for at, node in enumerate(nodes):
            node.register_hook(lambda *_, at=at: calls.append(at))
        for _ in range(2):
            _backward(model)
            offloaded.step()
    assert sorted(calls) == sorted(2 * [*range(4)])


def test_backward_by_gradient_edges_keeps_the_gradients_of_these_alone(nvme: Path) -> None:
    plain, model = seeded(_model), seeded(_model)
    x = torch.ones(2, WIDTH)
    with infinity.offload(model, nvme, host_memory=least_budget(_model, nvme)) as offloaded:
        for each in (plain, model):
            edges = [get_gradient_edge(p) for p in [*each.parameters()][::2]]
            torch.autograd.backward(each(x).square().mean(), inputs=edges)
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        offloaded.optimizer.zero_grad()
    for ours, theirs in zip(found, plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours is None
        else:
            assert ours is not None
            assert same_bits(ours, theirs.grad)


@pytest.mark.parametrize("ask", [get_gradient_edge, lambda p: p.expand_as(p), torch.Tensor.view_as])
def test_node_of_a_weight_in_tiles_is_refused_by_name(ask: Any, nvme: Path) -> None:
    model: Any = seeded(_model)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=TILES):
        weight = model[0].weight
        args = (weight, weight) if ask is torch.Tensor.view_as else (weight,)
        with pytest.raises(RuntimeError, match=r"0\.weight is in tiles .* tile by tile"):
            ask(*args)


@pytest.mark.parametrize("act", [torch.Tensor.t_, lambda g: g.unsqueeze_(0)])
def test_gradient_that_is_to_lie_otherwise_is_refused_by_name(act: Any, nvme: Path) -> None:
    model: Any = seeded(_model)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        _backward(model)
        with pytest.raises(RuntimeError, match=r"_: the gradient of 0\.weight, which is offloaded"):
            act(model[0].weight.grad)
