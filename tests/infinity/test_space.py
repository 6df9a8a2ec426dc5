"""Space on NVMe: what the plan wants is never exceeded, and the least of it is enough."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from aio import AioError, File
from aio.process.threads import Latch
from swap.update.passes import Pass
from swap.update.pipeline import UpdatePipeline
from swap.update.stages import Job, Stages
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget, same_bits, values_of

STEPS = 4


def _train(nvme: Path, host_memory: int) -> tuple[dict[str, torch.Tensor], int]:
    """The values after some steps, and the bytes that the swap files had come to.

    Each step is at home before the next backward pass: while it is under way, gradients that arrive
    begin no speculative update.
    """
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(STEPS):
            loss = vector_loss(model, step)
            offloaded.flush()
            loss.backward()
            offloaded.step()
        offloaded.flush()
        nbytes = sum(file.stat().st_size for file in nvme.rglob("*.swap"))
    return values_of(model), nbytes


@pytest.mark.timeout(60)
def test_swap_files_take_what_the_plan_wants_and_the_least_of_it_is_enough(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    least = least_budget(Stack, nvme)
    plan = infinity.plan(Stack(), host_memory=least)
    allocate, validate = File.allocate, UpdatePipeline.validate

    def validate_when_done(self: UpdatePipeline, *arguments: Any) -> bool:
        while (work := self._current) is not None and not work.is_rolled_back:
            if not (work.ahead or work.reading or work.writing):
                break  # all that a speculative update has done is held back
            os.sched_yield()
        return validate(self, *arguments)

    monkeypatch.setattr(UpdatePipeline, "validate", validate_when_done)
    ample, nbytes = _train(nvme, least)
    assert plan.nvme_bytes < nbytes <= plan.nvme_wanted_bytes

    def allocate_within(self: File, offset: int, nbytes: int) -> None:
        if offset + nbytes > plan.nvme_bytes:
            raise AioError("no more than the least", errno=errno.ENOSPC)
        allocate(self, offset, nbytes)

    monkeypatch.setattr(File, "allocate", allocate_within)
    with caplog.at_level(logging.WARNING):
        scarce, nbytes = _train(nvme, least)
    assert nbytes <= plan.nvme_bytes
    assert sum("updates during the backward pass are off" in text for text in caplog.messages) == 1
    assert all(same_bits(value, scarce[name]) for name, value in ample.items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("refusal", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_a_disk_that_fills_up_behind_a_validated_speculative_update_costs_no_step(
    refusal: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = least_budget(Stack, nvme)
    expected, _ = _train(nvme, least)
    advance, start_write = UpdatePipeline._advance, Stages.start_write
    validated: list[bool] = []

    def next_unless_decided(pipeline: UpdatePipeline, work: Pass) -> Latch | None:
        with pipeline._lock:
            is_decided = work.is_validated or work.is_rolled_back
            return None if is_decided else pipeline._changes.next()

    def advance_when_confirmed(self: UpdatePipeline, work: Pass) -> None:
        if work.was_speculative and not validated:
            while (change := next_unless_decided(self, work)) is not None:
                change.wait()
            validated.append(work.is_validated)
        advance(self, work)

    def fail_once(self: Stages, job: Job) -> None:
        if validated == [True]:
            validated.append(False)
            raise AioError("the disk is full for now", errno=getattr(errno, refusal))
        start_write(self, job)

    monkeypatch.setattr(UpdatePipeline, "_advance", advance_when_confirmed)
    monkeypatch.setattr(Stages, "start_write", fail_once)
    found, _ = _train(nvme, least)
    assert validated == [True, False]
    assert all(same_bits(value, found[name]) for name, value in expected.items())
