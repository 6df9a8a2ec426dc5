"""Space on NVMe: what the plan wants is never exceeded, and the least of it is enough."""

import errno
import logging
from pathlib import Path

import pytest
import torch

import infinity
from aio import AioError
from swap.storage.extents import ExtentStore, _Volume
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget, same_bits, values_of

STEPS = 4


def _train(nvme: Path, host_memory: int) -> tuple[dict[str, torch.Tensor], int]:
    """The values after some steps, and the bytes that the swap files had come to."""
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(STEPS):
            vector_loss(model, step).backward()
            offloaded.step()
        offloaded.flush()
        nbytes = sum(file.stat().st_size for file in nvme.rglob("*.swap"))
    return values_of(model), nbytes


def test_swap_files_take_what_the_plan_wants_and_the_least_of_it_is_enough(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    least = least_budget(Stack, nvme)
    plan = infinity.plan(Stack(), host_memory=least)
    ample, nbytes = _train(nvme, least)
    assert plan.nvme_bytes < nbytes <= plan.nvme_wanted_bytes
    grow = ExtentStore._grow

    def grow_within(self: ExtentStore, volume: _Volume, step: int) -> None:
        if volume.nbytes + step > plan.nvme_bytes:
            raise AioError("no more than the least", errno=errno.ENOSPC)
        grow(self, volume, step)

    monkeypatch.setattr(ExtentStore, "_grow", grow_within)
    with caplog.at_level(logging.WARNING):
        scarce, nbytes = _train(nvme, least)
    assert nbytes <= plan.nvme_bytes
    # None where the step was taken before an early update met the end of the disk.
    assert sum("updates during the backward pass are off" in text for text in caplog.messages) <= 1
    assert all(same_bits(value, scarce[name]) for name, value in ample.items())
