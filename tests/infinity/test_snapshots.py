"""Snapshots: what they restore, in this block and in another, and what they copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import seeded
from tests.support.proof import by_turns
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train
from tests.support.training import WHOLE, least_budget

DTYPES = [None, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


@pytest.mark.parametrize(("dtype", "is_least"), by_turns(DTYPES, [True, False]))
def test_restored_state_is_that_of_the_snapshot_and_training_goes_on_from_it(
    dtype: torch.dtype | None, is_least: bool, least: int, nvme: Path
) -> None:
    options: dict[str, Any] = {"optimizer": ADAMW, "compute_dtype": dtype}
    host_memory = least if is_least else WHOLE
    with infinity.offload(
        seeded(Net), nvme, host_memory=host_memory, max_grad_norm=1.0, **options
    ) as offloaded:
        torch.manual_seed(3)
        train(offloaded, 0, 3, dtype)
        taken = offloaded.snapshot("a", extra={"epoch": 3})
        before = everything(offloaded)
        train(offloaded, 3, 6, dtype)
        after = everything(offloaded)
        assert offloaded.restore("a") == {"epoch": 3}
        assert_same(before, everything(offloaded))
        train(offloaded, 3, 6, dtype)
        assert_same(after, everything(offloaded))
        assert offloaded.snapshots() == [taken]
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
    with infinity.offload(
        seeded(Net, 9), nvme, host_memory=host_memory, max_grad_norm=1.0, **options
    ) as offloaded:
        assert offloaded.snapshots() == [taken]
        assert offloaded.restore("a") == {"epoch": 3}
        assert_same(before, everything(offloaded))
        train(offloaded, 3, 6, dtype)
        assert_same(after, everything(offloaded))
        offloaded.drop_snapshot("a")
        assert_same(after, everything(offloaded))
    assert list(nvme.iterdir()) == []
