"""Products with weights in tiles: in odd dtypes, and gradients of them that programs keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from tests.support.models import is_in_tiles, make_tied, seeded
from tests.support.training import WHOLE

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1 << 18
WIDTH = 256


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _make_frozen_complex() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.complex64), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


def test_gradient_behind_frozen_complex_weights_is_that_of_torch(nvme: Path) -> None:
    def gradient_of(model: nn.Sequential) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, WIDTH, dtype=torch.complex64, generator=generator, requires_grad=True)
        out = model[0](x)
        (out.real.square().sum() + out.imag.sum()).backward()
        return x.grad

    model = seeded(_make_frozen_complex)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        assert is_in_tiles(model[0])
        found = gradient_of(model)
    torch.testing.assert_close(found, gradient_of(model))


def test_autocast_leaves_double_precision_alone(nvme: Path) -> None:
    def trained(model: nn.Module) -> list[torch.Tensor]:
        x = torch.arange(3.0 * WIDTH, dtype=torch.float64).view(3, WIDTH) / WIDTH
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.square().mean().backward()
        assert x.grad is not None
        return [out.detach(), x.grad]

    model = seeded(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    expected = trained(model)
    options: Any = {"host_memory": WHOLE, "max_parameter_bytes": BOUND, "optimizer": _sgd}
    with infinity.offload(model, nvme, **options):
        assert is_in_tiles(model)
        found = trained(model)
    torch.testing.assert_close(found, expected)


def _differentiated(tiles: list[Any], loss: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss, tiles)]


def _hooked(tiles: list[Any], loss: torch.Tensor) -> list[torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    for index, tile in enumerate(tiles):
        tile.register_hook(lambda gradient, index=index: kept.update({index: gradient}))
    loss.backward()
    return [kept[index] for index in range(len(tiles))]


@pytest.mark.parametrize(
    ("take", "is_late"), [(_differentiated, False), (_differentiated, True), (_hooked, False)]
)
def test_gradients_that_a_program_keeps_are_those_of_then(
    take: Callable[[list[Any], torch.Tensor], list[torch.Tensor]], is_late: bool, nvme: Path
) -> None:
    """They were computed at their first use, from inputs that had changed."""
    model = seeded(lambda: nn.Linear(WIDTH, 4 * WIDTH))
    x = torch.arange(3.0 * WIDTH).view(3, WIDTH) / WIDTH
    batch = x.clone()
    (expected,) = torch.autograd.grad(model(x).square().mean(), [model.weight])
    if is_late:
        model.weight.requires_grad_(False)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        assert is_in_tiles(model)
        model.weight.requires_grad_()
        tiles: Any = model.weight
        kept = take(tiles.tiles, model(batch).square().mean())
        batch.zero_()  # the next one comes to the same place
        torch.testing.assert_close(torch.cat(kept), expected)
        assert kept[0].data_ptr()
        kept[0].mul_(2)
        torch.testing.assert_close(kept[0].clone(), 2 * expected[: len(kept[0])])


def test_gradients_of_a_tied_table_that_a_program_keeps_are_of_both_uses(nvme: Path) -> None:
    tokens = torch.tensor([[1, 999, 5], [5, 0, 444]])
    model = seeded(make_tied)
    (expected,) = torch.autograd.grad(model(tokens).square().mean(), [model[0].weight])
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        batch = tokens.clone()
        kept = torch.autograd.grad(model(batch).square().mean(), model[0].weight.tiles)
        batch.zero_()
        torch.testing.assert_close(torch.cat(kept), expected)


def test_vmap_maps_over_tables_and_layers_in_tiles(nvme: Path) -> None:
    tokens = torch.tensor([[1, 999, 5], [5, 0, 444]])
    model = seeded(make_tied)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        assert is_in_tiles(model[0])
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(model)(tokens), model(tokens))


@pytest.mark.parametrize(
    ("indices", "padding"),
    [
        (torch.ones(3, dtype=torch.int8), None),
        (torch.ones(0), None),
        (torch.ones(3, dtype=torch.int64), 4 * WIDTH),
        (torch.ones(3, dtype=torch.int64), -4 * WIDTH - 1),
    ],
)
def test_what_torch_does_not_look_up_is_refused_in_its_words(
    nvme: Path, indices: torch.Tensor, padding: int | None
) -> None:
    model = seeded(lambda: nn.Embedding(4 * WIDTH, WIDTH))
    with pytest.raises((RuntimeError, AssertionError)) as expected:
        F.embedding(indices, model.weight, padding)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        assert is_in_tiles(model)
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            F.embedding(indices, model.weight, padding)


@pytest.mark.parametrize("shape", [(), (1,), (1, 2 * WIDTH), (3, 1), (3, 2 * WIDTH)])
def test_bias_is_broadcast_as_without_tiles(nvme: Path, shape: tuple[int, ...]) -> None:
    def computed(model: nn.Linear) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, WIDTH, generator=generator)
        bias = torch.randn(shape, generator=generator, requires_grad=True)
        out = F.linear(x, model.weight, bias)
        out.square().mean().backward()
        assert bias.grad is not None
        return [out.detach(), bias.grad]

    model = seeded(lambda: nn.Linear(WIDTH, 2 * WIDTH))
    expected = computed(model)
    model.zero_grad()
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        assert is_in_tiles(model)
        torch.testing.assert_close(computed(model), expected)


def test_bias_with_too_many_elements_is_refused(nvme: Path) -> None:
    model = seeded(lambda: nn.Linear(WIDTH, 2 * WIDTH))
    options: Any = {"host_memory": WHOLE, "max_parameter_bytes": BOUND}
    with infinity.offload(model, nvme, **options), pytest.raises(RuntimeError, match="size"):
        F.linear(torch.ones(3, WIDTH), model.weight, torch.ones(3 * WIDTH))
