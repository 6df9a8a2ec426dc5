"""Distinct parameters over the same memory are refused, however they lie in it; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from tests.support.training import same_bits

Pair = tuple[torch.Tensor, torch.Tensor]


def _matrix() -> torch.Tensor:
    return torch.arange(64.0 * 64).view(64, 64)


def _arrays() -> Pair:
    array = np.arange(4096, dtype=np.float32)
    return torch.from_numpy(array[:1024]), torch.from_numpy(array[1000:])


SHARING: dict[str, Callable[[], Pair]] = {
    "a part": lambda: ((whole := _matrix()), whole[3:5]),
    "transposed": lambda: ((whole := _matrix()), whole.t()),
    "a row of every second": lambda: ((whole := _matrix())[::2], whole[60:62]),
    "a column of many": lambda: ((whole := _matrix())[:, :40], whole[:, 39:]),
    "arrays of one memory": _arrays,
    "other elements of the same bytes": lambda: (
        (whole := _matrix())[:, ::2],
        whole.view(torch.bfloat16)[7:9, 128 // 2 :],
    ),
}
APART: dict[str, Callable[[], Pair]] = {
    "rows": lambda: ((whole := _matrix())[:32], whole[32:]),
    "columns": lambda: ((whole := _matrix())[:, :32], whole[:, 32:]),
    "rows in turn": lambda: ((whole := _matrix())[::2], whole[1::2]),
    "parts of complex numbers": lambda: (
        (whole := torch.randn(64, 64, dtype=torch.complex64)).real,
        whole.imag,
    ),
}


def _model(pair: Pair) -> nn.Module:
    model = nn.Module()
    model.first, model.second = map(nn.Parameter, pair)
    return model


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("turned", [False, True])
def test_parameters_over_the_same_memory_are_refused(name: str, turned: bool, nvme: Path) -> None:
    first, second = SHARING[name]()
    model = _model((second, first) if turned else (first, second))
    with pytest.raises(ValueError, match="different parameters over the same memory"):
        infinity.offload(model, nvme).__enter__()


@pytest.mark.parametrize("name", APART)
def test_parameters_that_take_turns_in_memory_are_offloaded(name: str, nvme: Path) -> None:
    model = _model(APART[name]())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass
    assert all(map(same_bits, model.parameters(), before))


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("persistent", [False, True])
def test_buffer_over_memory_of_a_trained_parameter_is_refused(
    name: str, persistent: bool, nvme: Path
) -> None:
    first, second = SHARING[name]()
    model = nn.Module()
    model.weight = nn.Parameter(first)
    model.register_buffer("seen", second, persistent=persistent)
    refusal = r"buffer seen and parameter weight share memory.*requires_grad_\(False\)"
    with pytest.raises(ValueError, match=refusal):
        infinity.offload(model, nvme).__enter__()
    model.weight.requires_grad_(False)  # nothing to follow
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass


@pytest.mark.parametrize("name", APART)
def test_buffer_that_takes_turns_with_a_parameter_in_memory_is_offloaded(
    name: str, nvme: Path
) -> None:
    first, second = APART[name]()
    model = nn.Module()
    model.weight = nn.Parameter(first)
    model.register_buffer("seen", second)
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda seen: seen,
    "list": lambda seen: [None, seen],
    "tuple": lambda seen: (seen, 3),
    "dictionary": lambda seen: {"seen": seen},
    "another Parameter": nn.Parameter,
}


@pytest.mark.parametrize("how", KEPT)
def test_attribute_over_memory_of_a_trained_parameter_is_refused(how: str, nvme: Path) -> None:
    model = nn.Sequential(linear := nn.Linear(8, 8))
    linear.__dict__["seen"] = KEPT[how](linear.weight.data.t())
    refusal = r"attribute 0\.seen and parameter 0\.weight share memory.*make it a clone"
    with pytest.raises(ValueError, match=refusal):
        infinity.offload(model, nvme).__enter__()
    linear.weight.requires_grad_(False)  # nothing to follow
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass


def test_attributes_that_are_parameters_or_are_computed_in_forward_are_offloaded(
    nvme: Path,
) -> None:
    linear = nn.utils.spectral_norm(nn.Linear(8, 8))
    model = nn.Sequential(nn.LSTM(8, 8), linear)
    model.__dict__["weights"] = [*model.parameters()]
    model.__dict__["first"] = {"copy": linear.bias.detach().clone()}
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass


EXPANDED: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.randn(64, 1).expand(64, 64),
    "windows": lambda: torch.randn(127).as_strided((64, 64), (1, 1)),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_elements_that_are_one_in_memory_are_refused_if_trained(name: str, nvme: Path) -> None:
    model = _model((EXPANDED[name](), _matrix()))
    with pytest.raises(ValueError, match=r"first is expanded: .*clone\(\)"):
        infinity.offload(model, nvme).__enter__()
    first = model.get_parameter("first").requires_grad_(False)
    before = first.detach().clone()
    with infinity.offload(model, nvme, host_memory="64MiB"):
        pass
    assert same_bits(first.detach(), before)
