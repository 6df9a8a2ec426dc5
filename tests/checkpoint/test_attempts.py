"""Loads that begin anew leave no values of what was begun before where nobody is told of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.directory import locate
from checkpoint.format.records import Manifest
from checkpoint.loading import reading
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()
Ends = Callable[[], None]


def read_then(monkeypatch: pytest.MonkeyPatch, path: Path, end: Ends) -> None:
    """The first load of a checkpoint reads all that it is to read, and ends as given."""
    read, ended = reading.read_tensors, list[bool]()

    def read_and_end(
        manifest: Manifest, checkpoint: Path, reads: Iterable[Any], options: Any
    ) -> None:
        read(manifest, checkpoint, reads, options)
        if checkpoint == path and not ended:
            ended.append(True)
            end()

    monkeypatch.setattr("checkpoint.loading.api.read_tensors", read_and_end)


def fail(code: int, path: Path) -> None:
    raise OSError(code, os.strerror(code), str(path))


@pytest.fixture
def manager(tmp_path: Path) -> checkpoint.Manager:
    (tmp_path / "stripe").mkdir()
    manager = checkpoint.Manager(tmp_path / "run", [tmp_path / "stripe"])
    manager.save(1, {"w": torch.ones(4)})
    manager.save(2, {"w": torch.full((4,), 2.0), "new": torch.full((4,), 3.0)})
    return manager


def tree() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4) for name in ("w", "new", "other")}


def test_values_of_a_step_that_goes_while_it_is_read_are_told_where_the_next_has_none(
    manager: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manager.path(2)

    def go() -> None:
        shutil.rmtree(path)
        fail(errno.ENOENT, path / "data")

    read_then(monkeypatch, path, go)
    into = tree()
    with pytest.raises(BlockingIOError, match=r"was removed .*new of into may hold .*step-1"):
        manager.load(into=into, strict=False)
    into["new"].fill_(7)
    assert manager.load(into=into, strict=False)["w"][0] == 1
    assert into["new"][0] == 7


def test_a_step_that_goes_is_no_error_where_the_next_has_all_of_it(
    manager: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manager.path(2)

    def go() -> None:
        manager.save(3, {"w": torch.full((4,), 4.0), "new": torch.full((4,), 5.0)})
        shutil.rmtree(path)
        fail(errno.ENOENT, path / "data")

    read_then(monkeypatch, path, go)
    into = tree()
    manager.load(into=into, strict=False)
    assert [int(into[name][0]) for name in into] == [4, 5, 0]


@pytest.mark.parametrize("lost", ["manifest", "stripe"])
def test_values_of_a_step_whose_disk_dies_while_it_is_read_are_told(
    manager: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    path = manager.path(2)
    (folder,) = (manager.root.parent / "stripe").glob("step-2.*")
    (data,) = folder.glob("*.safetensors")
    opened = locate.open_regular_file

    def opening(file: Path, **options: Any) -> Any:
        if file.parent == path:
            fail(errno.EIO, file)
        return opened(file, **options)

    def die() -> None:
        if lost == "manifest":
            monkeypatch.setattr(locate, "open_regular_file", opening)
        else:
            folder.rename(folder.with_name("away"))
        fail(errno.EIO, data)

    read_then(monkeypatch, path, die)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="new of into may hold") as caught:
        manager.load(into=tree(), strict=False)
    assert caught.value.path == str(path)


def test_a_tree_that_is_loaded_into_may_be_an_iterator(tmp_path: Path) -> None:
    """As a file is: what a list is made of are patterns and directories."""

    class Sink:
        dtype, shape = torch.float32, (4,)

        def __init__(self) -> None:
            self.data = bytearray(16)

        def write(self, start: int, data: memoryview) -> None:
            self.data[start : start + len(data)] = data

        def __iter__(self) -> Sink:
            return self

        def __next__(self) -> bytes:
            raise StopIteration

    manager = checkpoint.Manager(tmp_path)
    manager.save(1, torch.ones(4))
    sink = Sink()
    assert manager.load(into=sink) is sink
    assert torch.frombuffer(sink.data, dtype=torch.float32)[0] == 1


def test_a_pattern_that_matches_nothing_in_the_save_that_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before it, which it replaced while it was read, had such a leaf."""
    path = tmp_path / "run"
    checkpoint.save({"w": torch.ones(4), "new": torch.ones(4)}, path)

    def replace() -> None:
        checkpoint.save({"w": torch.zeros(4)}, path)
        fail(errno.ENOENT, path / "data")

    read_then(monkeypatch, path, replace)
    with pytest.raises(ValueError, match="only='new' matches no name"):
        checkpoint.load(path, only=["w", "new"])
