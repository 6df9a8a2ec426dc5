"""Gradients that a program assigns: what is refused changes nothing, and is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import infinity
from aio import AioError
from infinity.parameters.offloaded.gradient import OffloadedGradient
from swap.tiered import TieredState
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits

SHAPE = (256, 256)
Make = Callable[[torch.Tensor], Any]


def _freed(_: torch.Tensor) -> torch.Tensor:
    tensor = torch.ones(SHAPE)
    tensor.untyped_storage().resize_(0)
    return tensor


def _wrapper() -> torch.Tensor:
    made: torch.Tensor = TwoTensor(torch.ones(SHAPE), torch.ones(SHAPE))
    return made


def _of_another(parameter: Any) -> torch.Tensor:
    owner, index = parameter.offload_owner, parameter.offload_index
    return OffloadedGradient.of(owner, index + 1, torch.empty(SHAPE))


REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "that of another": (_of_another, RuntimeError, r"the gradient of layers.*clone\(\)"),
    "itself": (lambda p: p, RuntimeError, "itself"),
    "meta": (lambda p: torch.ones(SHAPE, device="meta"), ValueError, "meta"),
    "freed": (_freed, ValueError, "freed"),
    "wrapper": (lambda p: _wrapper(), ValueError, "TwoTensor without memory"),
    "shape": (lambda p: torch.ones(3), ValueError, r"\(3,\)"),
    "double": (lambda p: torch.ones(SHAPE, dtype=torch.float64), ValueError, "float64"),
    "integers": (lambda p: torch.ones(SHAPE, dtype=torch.int64), ValueError, "int64"),
    "complex": (lambda p: torch.ones(SHAPE, dtype=torch.complex64), ValueError, "complex64"),
    "number": (lambda p: 3.0, TypeError, "float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_gradient_leaves_the_one_that_is_there(name: str, nvme: Path) -> None:
    make, kind, text = REFUSED[name]
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        weight = model.layer(0).weight
        before = offloaded.gradient(weight)
        assert before is not None
        with pytest.raises(kind, match=rf"layers\.0\.weight.*{text}"):
            weight.grad = make(weight)
        after = offloaded.gradient(weight)
        assert after is not None
        assert same_bits(after, before)


def test_an_assigned_sparse_gradient_is_taken_for_its_values(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        weight = model.layer(0).weight
        gradient = torch.eye(*SHAPE)
        weight.grad = gradient.to_sparse()
        taken = offloaded.gradient(weight)
    assert taken is not None
    assert same_bits(taken, gradient)


SOURCES: dict[str, Callable[[Any, Any], Any]] = {
    "its view": lambda own, _: own.grad.view_as(own),
    "its rows in another order": lambda own, _: own.grad.t(),
    "a part, expanded": lambda own, _: own.grad[:1].expand(own.shape),
    "another weight": lambda _, other: other,
    "a view of another's gradient": lambda _, other: other.grad[:],
    "sparse": lambda own, _: own.grad.to_sparse(),
}


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_values_that_are_elsewhere_can_be_assigned(name: str, tiled: bool, nvme: Path) -> None:
    """Views of gradients, and weights, as any tensor in memory."""
    model = seeded(partial(Stack, 384, 3))
    options: dict[str, Any] = {"max_parameter_bytes": 1 << 18} if tiled else {}
    with infinity.offload(model, nvme, host_memory=WHOLE, **options) as offloaded:
        vector_loss(model, 0, width=384).backward()
        layers: Any = model.layers
        weight, other = layers[0].weight, layers[1].weight
        expected = SOURCES[name](weight, other).detach().clone()
        weight.grad = SOURCES[name](weight, other)
        taken = offloaded.gradient(weight)
        assert taken is not None
        assert same_bits(taken, expected if name != "sparse" else expected.to_dense())
        del weight.grad
        assert weight.grad is None
        model.zero_grad()


def test_a_gradient_of_any_dtype_is_taken_where_the_program_allows_it(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        weight: Any = model.layer(0).weight
        weight.grad_dtype = None
        weight.grad = torch.ones(SHAPE, dtype=torch.float64)
        taken = offloaded.gradient(weight)
    assert taken is not None
    assert same_bits(taken, torch.ones(SHAPE))


def test_an_assigned_gradient_that_cannot_be_kept_is_lost_by_name(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not left out of the next step without a word."""
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        weight = model.layer(0).weight

        def fail(*_: Any) -> None:
            raise AioError("no luck", errno=5)

        with monkeypatch.context() as patched:
            patched.setattr(TieredState, "add_gradient", fail)
            with pytest.raises(AioError, match="no luck"):
                weight.grad = torch.ones(SHAPE)
        with pytest.raises(AioError, match=r"gradient of layers\.0\.weight was lost"):
            offloaded.step()
        offloaded.optimizer.zero_grad()


@pytest.mark.parametrize("host_memory", [WHOLE, None])
def test_gradient_of_a_parameter_that_came_frozen_is_refused(
    host_memory: int | None, nvme: Path
) -> None:
    model = seeded(Stack)
    weight = model.layer(0).weight.requires_grad_(False)
    host_memory = host_memory or least_budget(lambda: model, nvme)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight was frozen.*before the block"):
            weight.grad = torch.ones(SHAPE)
        weight.grad = None
        vector_loss(model, 0).backward()
        offloaded.step()


@pytest.mark.parametrize("way", ["hook", "gathered"])
def test_values_that_are_a_tensor_without_memory_are_refused(way: str, nvme: Path) -> None:
    """Its bytes are not there to be read."""
    model = seeded(Stack)
    weight = model.layer(1).weight
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        if way == "hook":
            weight.register_hook(lambda gradient: _wrapper())
            with pytest.raises(ValueError, match=r"gradient of layers\.1\.weight is a TwoTensor"):
                vector_loss(model, 0).backward()
            with pytest.raises(RuntimeError, match=r"gradient of layers\.1\.weight was lost"):
                offloaded.step()
            model.zero_grad()
        else:
            with (
                pytest.raises(ValueError, match=r"layers\.1\.weight is a Tensor without memory"),
                offloaded.gathered([weight], modify=True),
            ):
                weight.data = _wrapper()


def test_a_parameter_without_memory_is_refused_as_the_block_begins(nvme: Path) -> None:
    model = seeded(Stack)
    model.layer(1).weight = torch.nn.Parameter(_wrapper(), requires_grad=False)
    with pytest.raises(ValueError, match=r"^layers\.1\.weight is a TwoTensor without memory"):
        infinity.offload(model, nvme).__enter__()
