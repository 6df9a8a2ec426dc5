"""Folders that get their name when they are complete: whatever they are, whoever else writes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.directory.lock import Lock
from infinity.integrations import published
from tests.support.unread import unread


def _write(folder: Path, text: str, **options: bool) -> None:
    with published.replacing(folder, **options) as staged:
        (staged / "state").mkdir()
        (staged / "state" / "a.txt").write_text(text)
        (staged / "b.txt").write_text(text)


def _read(folder: Path) -> list[str]:
    return [(folder / "state" / "a.txt").read_text(), (folder / "b.txt").read_text()]


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


@pytest.mark.parametrize("name", [".", "./", "sub/..", "", "../run"])
def test_current_directory_gets_what_is_written_moved_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "mine.txt").write_text("mine")
    monkeypatch.chdir(run)
    for text in ("first", "second"):
        _write(Path(name).resolve(), text)
    assert _read(run) == ["second", "second"]
    assert (run / "mine.txt").read_text() == "mine"
    assert Path().samefile(run)
    assert _hidden(tmp_path) == []


@pytest.mark.parametrize("what", ["folder", "replaced", "written"])
def test_folder_that_cannot_be_looked_at_is_not_taken_for_gone(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    _write(run, "first")
    replaced, written = published.replaced_of(run), run / published._WRITTEN
    for folder in (replaced, written):
        folder.mkdir()
    failing = {"folder": run, "replaced": replaced, "written": written}[what]
    with unread(failing), pytest.raises(OSError, match="does not answer"):
        published.recover(run)
    assert _read(run) == ["first", "first"]


def test_folder_that_cannot_be_renamed_is_complete_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "first")
    moved = os.rename

    def killed_later(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "state":
            raise KeyboardInterrupt
        moved(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed_later)
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path, "second")
    published.recover(tmp_path)
    assert _read(tmp_path) == ["second", "second"]
    assert _hidden(tmp_path) == []


def test_folder_that_cannot_be_renamed_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match="name one within it") as caught:
        _write(tmp_path, "first", keeps_others=False)
    assert caught.value.errno == errno.EBUSY
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_two_writers_of_one_folder_each_write_all_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with published.replacing(run) as staged:
        (staged / "b.txt").write_text("first")
        (staged / "state").mkdir()
        _write(run, "second")
        published.remove_abandoned(tmp_path)
        (staged / "state" / "a.txt").write_text("first")
    assert _read(run) == ["first", "first"]
    assert _hidden(tmp_path) == []


def test_folder_that_a_killed_process_wrote_is_removed_by_the_next(tmp_path: Path) -> None:
    left, kept = tmp_path / ".saving-00c0ffee", tmp_path / ".saving-mine"
    for folder in (left, kept):
        (folder / "new").mkdir(parents=True)
    with Lock(left):
        _write(tmp_path / "run", "first")
        assert left.is_dir()
    _write(tmp_path / "run", "second")
    assert _hidden(tmp_path) == [kept.name]


def test_writer_that_never_ends_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "_TURN_SECONDS", 0.0)
    with Lock(tmp_path), pytest.raises(BlockingIOError, match="gives names in this folder"):
        _write(tmp_path / "run", "first")
    assert _hidden(tmp_path) == []


def test_interrupt_while_what_was_written_is_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: Any = shutil.rmtree
    interrupts = [KeyboardInterrupt()]

    def interrupted_once(path: Path, **options: bool) -> None:
        if interrupts:
            raise interrupts.pop()
        removed(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted_once)
    with pytest.raises(KeyboardInterrupt), published.staging(tmp_path) as staged:
        (staged / "half").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_interrupt_before_a_folder_is_locked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(published, "Lock", interrupted)
    with pytest.raises(KeyboardInterrupt), published.staging(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
