"""What ``compute_dtype`` leaves of values that nothing trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.test_weight_sources import store
from tests.support.training import same_bits


def test_a_buffer_that_nothing_changed_comes_back_exactly(
    nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    norm = model[1]
    norm.running_mean.copy_(torch.rand(8))  # type: ignore[operator]
    before = norm.running_mean.clone()  # type: ignore[operator]
    with infinity.offload(model, nvme, optimizer=None, compute_dtype=torch.bfloat16):
        norm.running_var.fill_(3.0)  # type: ignore[operator]
    assert same_bits(norm.running_mean, before)  # type: ignore[arg-type]
    assert torch.equal(norm.running_var, torch.full((8,), 3.0))  # type: ignore[arg-type]
    assert "88 values of 4 parameters that are not trained are rounded" in caplog.text


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
@pytest.mark.parametrize("optimizer", [infinity.AdamW(), None])
def test_stored_buffers_come_back_exactly_but_for_what_was_changed(
    kind: str, optimizer: infinity.AdamW | None, nvme: Path, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    stored = make().state_dict()
    stored["1.running_mean"] = torch.rand(8)
    stored["1.running_var"] = torch.rand(8)
    path = store(stored, tmp_path, kind)
    model = make()
    mean, var = model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")
    with infinity.offload(
        model, nvme, optimizer=optimizer, compute_dtype=torch.bfloat16, weights=path
    ):
        model.get_buffer("1.running_var")[3] = 5.0
    assert model.get_buffer("1.running_mean") is mean
    assert same_bits(mean, stored["1.running_mean"])
    stored["1.running_var"][3] = 5.0
    assert model.get_buffer("1.running_var") is var
    assert same_bits(var, stored["1.running_var"])
