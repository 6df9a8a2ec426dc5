"""Snapshots whose swap files were damaged, and what checksums that are kept with them tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.snapshots.reading import SavedPoint
from tests.support.damage import flip_in, state_of
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train
from tests.support.training import WHOLE, least_budget

NAME = "layers.5.weight"


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("least")
    return least_budget(Net, folder, optimizer=ADAMW, verify_swap=True)


def _block(nvme: Path, host_memory: int, *, verify: bool = True, seed: int = 0) -> Any:
    return infinity.offload(
        seeded(Net, seed), nvme, host_memory=host_memory, optimizer=ADAMW, verify_swap=verify
    )


def _take(nvme: Path, least: int, *, verify: bool = True) -> tuple[dict[str, Any], str, int]:
    """Everything that a snapshot ``a`` has, and where its master of ``NAME`` is."""
    with _block(nvme, least, verify=verify) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("a")
        state = state_of(offloaded)
        index = next(spec.index for spec in state.layout.specs if spec.name == NAME)
        segment = state.layout.segments_of[index][0]
        extent = state.components.extent(segment.subgroup, "exp_avg")
        assert extent is not None
        assert not extent.pieces
        place = state.folders[0].name, extent.offset + segment.offset * 4
        return everything(offloaded), *place


def _drop(nvme: Path) -> None:
    with _block(nvme, WHOLE) as offloaded:
        offloaded.drop_snapshot("a")
    assert list(nvme.iterdir()) == []


def test_what_a_new_block_takes_up_of_a_damaged_snapshot_is_told_when_it_is_read(
    least: int, nvme: Path
) -> None:
    before, name, offset = _take(nvme, least)
    (kept,) = nvme.rglob(f"{name}.swap")
    with _block(nvme, least, seed=9) as offloaded:
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        flip_in(kept, offset)
        with pytest.raises(infinity.CorruptSwapError, match=f"exp_avg of {NAME}") as caught:
            everything(offloaded)
        assert caught.value.filename == str(kept)
        flip_in(kept, offset)
        assert_same(before, everything(offloaded))
        train(offloaded, 2, 3)
    _drop(nvme)


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_copied_of_a_damaged_snapshot_is_compared(
    verify: bool, least: int, nvme: Path
) -> None:
    before, name, offset = _take(nvme, least)
    (kept,) = nvme.rglob(f"{name}.swap")
    flip_in(kept, offset)
    with _block(nvme, WHOLE, verify=verify, seed=9) as offloaded:
        with pytest.raises(infinity.CorruptSwapError, match=f"exp_avg of {NAME}") as caught:
            offloaded.restore("a")
        assert caught.value.filename == str(kept)
        with pytest.raises(infinity.MixedStateError):
            offloaded.flush()
        flip_in(kept, offset)
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
    _drop(nvme)


def test_snapshots_without_checksums_are_restored_and_nothing_is_claimed_of_them(
    least: int, nvme: Path
) -> None:
    before, name, offset = _take(nvme, least, verify=False)
    (kept,) = nvme.rglob(f"{name}.swap")
    with _block(nvme, least, seed=9) as offloaded:
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        flip_in(kept, offset)
        key = f"exp_avg of {NAME}"
        assert not torch.equal(before[key], everything(offloaded)[key])
        train(offloaded, 2, 3)
        offloaded.snapshot("a")
        assert_same(everything(offloaded), everything(offloaded))
    _drop(nvme)


def test_values_are_loaded_over_damaged_ones_that_a_snapshot_shares(
    least: int, nvme: Path, tmp_path: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.save(tmp_path / "saved")
        before = everything(offloaded)
        offloaded.snapshot("a")
        state = state_of(offloaded)
        extent = state.components.extent(len(state.layout.subgroups) - 1, "exp_avg")
        assert extent is not None
        flip_in(state.folders[0] / "state.swap", extent.offset)
        with pytest.raises(infinity.CorruptSwapError):
            everything(offloaded)
        offloaded.load(tmp_path / "saved")
        assert_same(before, everything(offloaded))
        offloaded.restore("a")
        with pytest.raises(infinity.CorruptSwapError):
            everything(offloaded)
        offloaded.load(tmp_path / "saved")
        offloaded.drop_snapshot("a")


def test_state_in_host_memory_is_read_into_where_it_is(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("values were copied piece by piece")

    monkeypatch.setattr(SavedPoint, "fill", refuse)
    with _block(nvme, WHOLE, verify=False) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("a")
        before = everything(offloaded)
        train(offloaded, 2, 3)
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        offloaded.drop_snapshot("a")
