"""What a load leaves of the model that it is loaded into: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, seeded
from tests.support.training import WHOLE, least_budget, same_bits, values_of

ADAMW = infinity.AdamW(lr=1e-2)


def _model() -> Stack:
    return Stack(width=144, depth=6)


def _half_frozen(model: Stack) -> Any:
    model.layers[:3].requires_grad_(False)
    return ADAMW


def _none(model: Stack) -> Any:
    return None


@pytest.mark.parametrize("freeze", [_half_frozen, _none])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_load_of_what_was_not_trained_keeps_nothing_of_before(
    dtype: torch.dtype | None, freeze: Callable[[Stack], Any], nvme: Path, tmp_path: Path
) -> None:
    saved = seeded(_model, 1)
    optimizer = freeze(saved)
    with infinity.offload(saved, nvme, optimizer=optimizer, compute_dtype=dtype) as offloaded:
        offloaded.save(tmp_path / "saved")
    options: dict[str, Any] = {"optimizer": ADAMW, "compute_dtype": dtype}
    outcomes = []
    for host_memory in (WHOLE, least_budget(_model, nvme, **options)):
        for seed in (2, 3):
            model = seeded(_model, seed)
            with infinity.offload(model, nvme, host_memory=host_memory, **options) as offloaded:
                _train(offloaded, model, 5, dtype)
                offloaded.load(tmp_path / "saved")
                _train(offloaded, model, 6, dtype)
            outcomes.append(values_of(model))
    first, *others = outcomes
    for other in others:
        assert all(same_bits(value, other[name]) for name, value in first.items())


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(144, 144), nn.BatchNorm1d(144), nn.Linear(144, 8))


@pytest.mark.parametrize("here", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved_in", [None, torch.bfloat16, torch.float16])
def test_buffers_come_from_a_checkpoint_or_snapshot_of_another_compute_dtype(
    saved_in: torch.dtype | None, here: torch.dtype | None, nvme: Path, tmp_path: Path
) -> None:
    saved = seeded(_normed, 1)
    with infinity.offload(saved, nvme, optimizer=ADAMW, compute_dtype=saved_in) as offloaded:
        _train(offloaded, saved, 5, saved_in)
        offloaded.save(tmp_path / "saved")
        offloaded.snapshot("saved")
        expected = {
            name: buffer.to(here or torch.float32) if buffer.is_floating_point() else buffer.clone()
            for name, buffer in saved.named_buffers()
        }
    for take in ("load", "restore"):
        model = seeded(_normed, 2)
        with infinity.offload(model, nvme, optimizer=ADAMW, compute_dtype=here) as offloaded:
            if take == "load":
                offloaded.load(tmp_path / "saved")
            else:
                offloaded.restore("saved")
            buffers = dict(model.named_buffers())
            assert all(same_bits(expected[name], value) for name, value in buffers.items())
            if take == "restore":
                offloaded.drop_snapshot("saved")
        parameters = dict(model.named_parameters())
        assert all(same_bits(p, parameters[name]) for name, p in saved.named_parameters())


def _train(
    offloaded: infinity.OffloadedModel, model: nn.Module, number: int, dtype: torch.dtype | None
) -> None:
    x = torch.randn(4, 144, generator=torch.Generator().manual_seed(number))
    offloaded.backward(model(x.to(dtype or torch.float32)).float().square().mean())
    offloaded.step()
