"""Folders that snapshots keep files in: what stays, so that what is kept can be given back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swap.snapshots.folders import Folders
from swap.storage.drives.directory import FOLDER


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        root.mkdir()
    return roots


@pytest.mark.parametrize("kept_on", [0, 1])
def test_file_whose_process_has_not_ended_is_found_by_who_comes_later(
    roots: list[Path], kept_on: int
) -> None:
    """On whichever SSD it is: the folders begin with the first one, which may keep nothing."""
    process = roots[kept_on] / FOLDER / "0123456789ab"
    process.mkdir(parents=True)
    (process / "state.swap").write_bytes(bytes(4096))
    block = Folders(roots)
    block.acquire(make=True)
    block.keep([process / "state.swap"])
    assert block.give_back({}) == 0
    block.release(is_empty=True)
    shutil.rmtree(process)

    later = Folders(roots)
    later.remove_unfinished()
    assert later.acquire(make=False) is not None
    assert later.give_back({}) == 4096
    later.release(is_empty=True)
    assert [path for root in roots for path in root.iterdir()] == []
