"""Updates of state in host memory that begin before their step, behind a device that computes."""

from __future__ import annotations

import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

import infinity
from swap.update.stages import Job, Stages
from tests.support.models import Gpt, token_loss
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.injected import simulated
from tests.support.training import WHOLE

_DEVICE_BYTES = 3 << 20
_TIMEOUT = 10.0


class Updated:
    """Which subgroups have been updated, be it before their step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: set[int] = set()
        self._changed = threading.Condition()
        run = Stages.run_kernel

        def run_and_note(stages: Stages, job: Job) -> None:
            run(stages, job)
            with self._changed:
                self.groups.add(job.subgroup.index)
                self._changed.notify_all()

        monkeypatch.setattr(Stages, "run_kernel", run_and_note)

    def wait_for(self, groups: Set[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.groups >= groups, _TIMEOUT), self.groups


def test_with_everything_in_memory_updates_begin_before_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what has no weights of any size; and the next backward pass finds it published."""
    model, updated = Gpt(), Updated(monkeypatch)
    given: dict[str, Any] = {"host_memory": WHOLE, "device_memory": _DEVICE_BYTES}
    with simulated(SimulatedDevice), infinity.offload(model, tmp_path, **given) as offloaded:
        state = offloaded._training.state
        spared = state.placement.spared
        moving = {g.index for g in state.layout.subgroups if not g.always_on_host}
        assert spared == moving
        for step in range(4):
            updated.groups.clear()
            token_loss(model, step).backward()
            if step:
                updated.wait_for(spared)
            else:
                assert not updated.groups, "there is no step to learn from"
            offloaded.step()
        offloaded.flush()
        assert sorted(updated.groups - spared) == sorted(
            group.index for group in state.layout.subgroups if group.always_on_host
        )


def test_spare_blocks_are_within_the_budget_that_the_plan_states(tmp_path: Path) -> None:
    model = Gpt()
    with simulated(SimulatedDevice):
        plan = infinity.plan(model, tmp_path, WHOLE, device_memory=_DEVICE_BYTES)
        given: dict[str, Any] = {"host_memory": WHOLE, "device_memory": _DEVICE_BYTES}
        with infinity.offload(model, tmp_path, **given) as offloaded:
            placement = offloaded._training.state.placement
            assert placement.spare_bytes > 0
            assert plan.host_bytes == placement.host_bytes <= WHOLE
            assert plan.bytes_by_tier["host"] == (
                placement.state_host_bytes + placement.gradient_host_bytes
            )
