"""Folders that snapshots keep files in: what stays, so that what is kept can be given back."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from swap.snapshots import folders
from swap.snapshots.folders import Folders
from swap.storage.drives.directory import FOLDER
from tests.support.unread import unread


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


@pytest.mark.parametrize("what", ["process", "kept file", "lock"])
def test_what_cannot_be_looked_at_is_not_taken_for_gone(roots: list[Path], what: str) -> None:
    process = roots[0] / FOLDER / "0123456789ab"
    process.mkdir(parents=True)
    (process / "state.swap").write_bytes(bytes(4096))
    block = Folders(roots)
    points = block.acquire(make=True)
    assert points is not None
    block.keep([process / "state.swap"])
    kept = points.parent / "0123456789ab.swap"
    with unread({"process": process, "kept file": kept, "lock": points.parent / "lock"}[what]):
        if what == "process":
            assert block.give_back({}) == 0
        elif what == "kept file":
            with pytest.raises(OSError, match="does not answer"):
                block.file("0123456789ab")
        else:
            with pytest.raises(OSError, match="does not answer"):
                Folders(roots).acquire(make=False)
    assert kept.stat().st_size == 4096
    block.release(is_empty=False)


@pytest.mark.parametrize("is_killed", [True, False])
def test_folder_of_stores_in_which_none_came_to_be_goes(
    roots: list[Path], is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end of the block where making one failed, or by the next one, where it was killed."""
    process = roots[1] / FOLDER / "0123456789ab"
    process.mkdir(parents=True)
    (process / "state.swap").write_bytes(bytes(4096))
    block = Folders(roots)
    points = block.acquire(make=True)
    assert points is not None
    make = Path.mkdir

    def make_all_but_a_store(path: Path, *given: Any, **named: Any) -> None:
        if path.name == points.parent.name:
            raise OSError(errno.ENOSPC, "no room", str(path))
        make(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", make_all_but_a_store)
        with pytest.raises(OSError, match="no room"):
            block.keep([process / "state.swap"])
    shutil.rmtree(process)
    if is_killed:
        shutil.rmtree(roots[0] / FOLDER)
        Folders(roots).remove_unfinished()
    else:
        block.release(is_empty=True)
    assert [path for root in roots for path in root.iterdir()] == []


@pytest.mark.parametrize("num_synced", range(4))
def test_store_that_cannot_be_made_durable_leaves_nothing(
    roots: list[Path], num_synced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is made after it."""
    left = num_synced

    def sync_some(path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "no room", str(path))

    block = Folders(roots)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync_directory", sync_some)
        with pytest.raises(OSError, match="no room"):
            block.acquire(make=True)
    assert [path for root in roots for path in root.iterdir()] == []
    assert block.acquire(make=True) is not None
    block.release(is_empty=True)
    assert [path for root in roots for path in root.iterdir()] == []
