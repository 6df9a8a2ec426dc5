"""Folders that were made for something that failed go while nobody else uses them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.directory.lock import Lock
from infinity.integrations import published
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

WAYS: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda value, path: checkpoint.save({"x": value}, path),
    "export": lambda value, path: checkpoint.write_safetensors({"x": value}, path),
}
every_way = pytest.mark.parametrize("way", WAYS)


class Broken:
    dtype = torch.float32
    shape = (1 << 12,)

    def read(self, start: int, out: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")


@every_way
def test_a_folder_is_removed_with_the_lock_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path, seen, remove = tmp_path / "a" / "b", list[bool](), Path.rmdir

    def removing(folder: Path) -> None:
        if folder == path:
            try:
                with Lock(path):
                    seen.append(False)
            except BlockingIOError:
                seen.append(True)
        remove(folder)

    monkeypatch.setattr(Path, "rmdir", removing)
    with pytest.raises(OSError, match="Input/output"):
        WAYS[way](Broken(), path)
    assert seen == [True]
    assert not list(tmp_path.iterdir())


def _remove_with_parents(path: Path) -> None:
    while path.name != "a":
        path = path.parent
        if path.exists():
            path.rmdir()


@pytest.fixture
def vanishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose making is preceded by what removes those above them, once each."""
    left = [tmp_path / "a" / "b"]
    make = Path.mkdir

    def making(folder: Path, *arguments: Any, **options: Any) -> None:
        is_staged = folder.name.startswith(".saving-")
        if (folder in left or is_staged) and left:
            left.clear()
            _remove_with_parents(folder)
        make(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", making)
    return left


@every_way
def test_folders_that_another_one_removes_meanwhile_are_made_again(
    tmp_path: Path, vanishing: list[Path], way: str
) -> None:
    WAYS[way](torch.ones(3), tmp_path / "a" / "b")
    assert not vanishing
    assert any((tmp_path / "a" / "b").iterdir())


@every_way
def test_folders_that_go_between_their_making_and_the_lock_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path, opened = tmp_path / "a" / "b", list[Path]()
    really = Lock._has_it

    def has_it(lock: Lock) -> bool:
        if len(opened) < 2 and path.is_dir() and not any(path.iterdir()):
            _remove_with_parents(path / "c")
        opened.append(path)
        return really(lock)

    monkeypatch.setattr(Lock, "_has_it", has_it)
    WAYS[way](torch.ones(3), path)
    assert len(opened) > 1
    opened.clear()


def test_a_writer_makes_its_folder_again_that_another_one_removes_meanwhile(
    tmp_path: Path, vanishing: list[Path]
) -> None:
    with published.staging(tmp_path / "a") as staged:
        assert staged.is_dir()
    assert not vanishing


@every_way
def test_what_was_made_again_goes_too_where_nothing_comes_of_it(
    tmp_path: Path, vanishing: list[Path], way: str
) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="Input/output"):
        WAYS[way](Broken(), tmp_path / "a" / "b")
    assert not vanishing
    assert not list(tmp_path.iterdir())
