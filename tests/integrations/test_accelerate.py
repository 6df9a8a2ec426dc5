"""``OffloadAccelerator`` at the least budget beside ``Accelerator`` in memory: the same bits, and
again after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from infinity.integrations.accelerate import OffloadAccelerator
from tests.support import accelerated
from tests.support.accelerated import ACCUMULATE, Run, fused, least_of, script, sgd
from tests.support.trainers import run_killed
from tests.support.training import same_bits


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with accelerated.fresh_accelerate():
        yield


def _plain(**options: Any) -> Run:
    with accelerated.fresh_accelerate():
        return script(Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE), **options)


def offloaded(nvme: Any, least: int, **options: Any) -> Run:
    made = OffloadAccelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATE, nvme=nvme, host_memory=least
    )
    return script(made, **options)


def assert_same(first: Run, second: Run) -> None:
    assert first.seen == second.seen
    assert first.values.keys() == second.values.keys()
    for name, value in first.values.items():
        assert same_bits(value, second.values[name]), name


@pytest.mark.parametrize("optimizer", [fused, sgd])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_a_script_at_the_least_budget_has_the_bits_of_one_in_memory(
    optimizer: Callable[..., torch.optim.Optimizer], clip: str, nvme: Path
) -> None:
    least = least_of(nvme, optimizer)
    expected = _plain(optimizer=optimizer, clip=clip)
    assert_same(expected, offloaded(nvme, least, optimizer=optimizer, clip=clip))


def killed_after_step_5(folder: str, nvme: str, least: int) -> None:
    """In a process of its own."""
    offloaded(nvme, least, folder=Path(folder), kill_at=5)


def test_a_script_that_was_killed_goes_on_to_the_same_bits(nvme: Path, tmp_path: Path) -> None:
    least, folder = least_of(nvme), tmp_path / "state"
    whole = _plain()
    run_killed(f"{__name__}:killed_after_step_5({str(folder)!r}, {str(nvme)!r}, {least})")
    resumed = offloaded(nvme, least, resume=folder)
    assert resumed.seen == whole.seen[-len(resumed.seen) :]
    assert_same(Run(resumed.seen, whole.values), resumed)
