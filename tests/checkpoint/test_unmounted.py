"""Data on disks that are not mounted while their checkpoint is replaced are not forgotten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import checkpoint
from aio import sync_directory
from checkpoint.directory.stripe_list import STRIPES_NAME, listed_stripes


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"w{k}": torch.full((1000,), number) for k in range(4)}


def test_data_on_an_ssd_that_was_away_are_removed_when_it_is_back(
    tmp_path: Path, stripes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, away = tmp_path / "run", tmp_path / "away"
    first = checkpoint.save(state(1), path, stripes).uuid
    stripes[0].rename(away)
    stripes[0].mkdir()  # as a mount point is there without its disk
    for used in (stripes[1:], stripes):
        caplog.clear()
        checkpoint.save(state(2), path, used)
        assert f"data of save {first} are not removed, as nothing is mounted" in caplog.text
        assert (path / first / STRIPES_NAME).is_file()
    stripes[0].rename(tmp_path / "below")
    away.rename(stripes[0])
    checkpoint.save(state(3), path, stripes)
    assert not (path / first).exists()
    assert not (stripes[0] / f"run.{first}").exists()
    assert int(checkpoint.load(path)["w3"][0]) == 3


def test_data_that_somebody_removed_are_not_waited_for(
    tmp_path: Path, stripes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(state(1), path, stripes).uuid
    shutil.rmtree(stripes[0] / f"run.{first}")
    checkpoint.save(state(2), path, stripes[1:])
    assert not (path / first).exists()
    assert not caplog.records


def test_the_list_of_stripes_goes_when_their_removal_is_durable(
    tmp_path: Path, stripes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(state(1), path, stripes).uuid
    synced: set[Path] = set()
    listed: set[Path] = set()

    def sync(directory: Path) -> None:
        if not (directory / f"run.{first}").exists():
            synced.add(directory)
            listed.update({directory} if (path / first / STRIPES_NAME).exists() else ())
        sync_directory(directory)

    monkeypatch.setattr("checkpoint.directory.generations.sync_directory", sync)
    checkpoint.save(state(2), path, stripes)
    assert not (path / first).exists()
    assert set(stripes) <= synced
    assert set(stripes) <= listed


@pytest.mark.parametrize(
    "last", [None, {}, {"inodes": [1]}, {"inodes": "12"}, {"inodes": ["1", 2]}]
)
def test_a_list_without_good_inode_numbers_still_lists(tmp_path: Path, last: object) -> None:
    paths = [str(tmp_path / f"ssd{k}" / "run.0123abcd") for k in range(2)]
    (tmp_path / STRIPES_NAME).write_text(json.dumps([*paths, last]))
    listed = listed_stripes(tmp_path, "0123abcd")
    assert [str(stripe.path) for stripe in listed] == paths
    assert all(stripe.is_away() for stripe in listed), "what they were made in is not there"
