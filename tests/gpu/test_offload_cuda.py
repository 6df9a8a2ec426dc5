"""Offloading from a CUDA device. Run by ``make test-gpu``; skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import Gpt, seeded, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
STEPS = 8


def _train(nvme: Path, **options: Any) -> list[float]:
    model = seeded(Gpt)
    losses = []
    with infinity.offload(model, nvme, device="cuda", **options) as offloaded:
        for step in range(STEPS):
            batch = tokens(step).cuda()
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten()
            )
            offloaded.backward(loss)
            offloaded.step()
            losses.append(loss.item())
    return losses


def test_device_budget_bounds_the_weights_on_cuda(tmp_path: Path) -> None:
    limit = 16 << 20
    model = seeded(Gpt)
    with infinity.offload(
        model, tmp_path, device="cuda", host_memory="2GiB", device_memory=limit
    ) as offloaded:
        with torch.no_grad():
            model(tokens(0).cuda())
        arena = offloaded._training.state.arena
        assert arena is not None
        assert arena.peak_bytes <= limit
        assert offloaded.report().resident_bytes["device"] <= limit


def test_fp16_on_cuda_scales_the_loss_and_trains(tmp_path: Path) -> None:
    losses = _train(tmp_path, compute_dtype=torch.float16, host_memory="2GiB")
    assert losses[-1] < losses[0]


def test_model_returns_to_its_own_device(tmp_path: Path) -> None:
    model = seeded(Gpt)
    with infinity.offload(model, tmp_path, device="cuda", host_memory="2GiB"):
        assert all(p.device.type == "cuda" for p in model.parameters())
    assert all(p.device.type == "cpu" for p in model.parameters())
