"""Buffers from ``weights=``: of the shape and the dtype that the model has, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.test_weight_sources import store

KINDS = ["checkpoint", "safetensors"]


class _Buffered(nn.Module):
    def __init__(self, numel: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("kept", torch.full((numel,), 1.3).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (_Buffered(5), r"another shape: kept \(\(3,\), \(5,\)"),
        (_Buffered(3, torch.int64), r"kind of number: kept \(torch.float32, torch.int64"),
    ],
)
def test_stored_buffer_that_is_not_the_models_is_refused(
    kind: str, model: nn.Module, told: str, tmp_path: Path
) -> None:
    path = store(_Buffered().state_dict(), tmp_path, kind)
    with pytest.raises(ValueError, match=told):
        infinity.offload(model, tmp_path, weights=path).__enter__()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stored_buffer_of_another_precision_takes_that_of_the_model(
    kind: str, device: str, tmp_path: Path
) -> None:
    path = store(_Buffered().state_dict(), tmp_path, kind)
    model = _Buffered(3, torch.bfloat16).to(device)
    with infinity.offload(model, tmp_path, weights=path):
        assert torch.equal(model.get_buffer("kept"), torch.full((3,), 1.3, dtype=torch.bfloat16))
