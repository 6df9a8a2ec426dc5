"""Weights that do not lie in memory row by row are tiled, and come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, is_in_tiles, seeded
from tests.support.training import least_budget, same_bits, values_of

BOUND = 256 * 1024

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda values: values.t().contiguous().t(),
    "negative": torch._neg_view,
    "negative and transposed": lambda values: torch._neg_view(values.t().contiguous().t()),
    "part of rows": lambda values: torch.cat([values, values], 1)[:, : values.shape[1]],
}


def _model(name: str) -> Stack:
    model = seeded(lambda: Stack(512, 3))
    layer = model.layer(1)
    layer.weight = nn.Parameter(LAYOUTS[name](layer.weight.detach()))
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_tiled_weights_come_back_as_they_were(name: str, nvme: Path) -> None:
    model = _model(name)
    before, stride = values_of(model), model.layer(1).weight.stride()
    least = least_budget(lambda: _model(name), nvme, max_parameter_bytes=BOUND)
    for host_memory in (least - 1, least):
        with (
            nullcontext() if host_memory == least else pytest.raises(infinity.BudgetError),
            infinity.offload(model, nvme, host_memory=host_memory, max_parameter_bytes=BOUND),
        ):
            assert is_in_tiles(model.layer(1))
        assert all(same_bits(value, before[key]) for key, value in values_of(model).items())
        if "transposed" in name:
            assert model.layer(1).weight.stride() == stride
