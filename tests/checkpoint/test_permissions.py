"""Files that take the place of others have their permissions; what fails leaves no empty folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from aio import Engine
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

STATE = {"a": torch.ones(64), "b": torch.zeros(64)}


def modes(folder: Path, names: str = "*") -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.rglob(names) if file.is_file()}


def restrict(folder: Path, mode: int, names: str = "*") -> None:
    for file in folder.rglob(names):
        if file.is_file():
            file.chmod(mode)


def _save_through_dcp(path: Path) -> None:
    dcp_save(dict(STATE), storage_writer=checkpoint.dcp.StorageWriter(path), no_dist=True)


SAVES: dict[str, Callable[[Path], object]] = {
    "save": lambda path: checkpoint.save(STATE, path),
    "async": lambda path: checkpoint.save_async(STATE, path).result(),
    "dcp": _save_through_dcp,
    "manager": lambda path: checkpoint.Manager(path.parent).save(1, STATE),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o660])
@pytest.mark.parametrize("way", SAVES)
def test_a_save_over_a_checkpoint_keeps_who_may_read_it(
    tmp_path: Path, way: str, mode: int
) -> None:
    path = tmp_path / "step-1"
    SAVES[way](path)
    restrict(path, mode)
    for _ in range(2):
        SAVES[way](path)
        assert modes(path) == {mode}
    assert checkpoint.verify(path).ok


def test_data_on_stripes_keep_who_may_read_them(tmp_path: Path) -> None:
    stripes = [tmp_path / "s"]
    stripes[0].mkdir()
    for _ in range(2):
        checkpoint.save(STATE, tmp_path / "step", stripes)
        assert modes(tmp_path, "*.safetensors") in ({0o644}, {0o600})
        (tmp_path / "step" / "manifest.json").chmod(0o600)
    assert modes(tmp_path, "*.safetensors") == {0o600}


def test_a_first_save_has_what_the_process_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint.save(STATE, tmp_path / "step")
    finally:
        os.umask(before)
    assert modes(tmp_path / "step") == {0o640}


def test_nobody_else_reads_new_data_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(STATE, tmp_path / "step")
    restrict(tmp_path / "step", 0o600)
    seen: list[int] = []
    begin = Engine.open

    def noting(engine: Engine, path: Any, *args: Any, **options: Any) -> Any:
        file = begin(engine, path, *args, **options)
        seen.append(Path(path).stat().st_mode & 0o777)
        return file

    monkeypatch.setattr(Engine, "open", noting)
    checkpoint.save(STATE, tmp_path / "step")
    assert seen
    assert set(seen) == {0o600}


EXPORTS: list[tuple[int, int]] = [(1 << 20, 1 << 20), (300, 300), (1 << 20, 300), (300, 1 << 20)]


@pytest.mark.parametrize(("before", "after"), EXPORTS)
def test_an_export_over_another_keeps_who_may_read_it(
    tmp_path: Path, before: int, after: int
) -> None:
    checkpoint.write_safetensors(STATE, tmp_path, max_shard_bytes=before)
    restrict(tmp_path, 0o600)
    checkpoint.write_safetensors(STATE, tmp_path, max_shard_bytes=after)
    assert modes(tmp_path) == {0o600}


def test_shards_of_other_names_are_read_by_those_who_read_all_that_were_there(
    tmp_path: Path,
) -> None:
    checkpoint.write_safetensors(STATE, tmp_path, max_shard_bytes=300)
    (tmp_path / "model-00002-of-00002.safetensors").chmod(0o600)
    checkpoint.write_safetensors(STATE, tmp_path)
    assert modes(tmp_path, "*.safetensors") == {0o600}
    assert modes(tmp_path, "*.json") == {0o644}


def test_the_owner_stays_where_the_process_may_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    checkpoint.save(STATE, tmp_path / "step")
    restrict(tmp_path / "step", 0o600)
    monkeypatch.setattr(os, "fchown", refused)
    checkpoint.save(STATE, tmp_path / "step")
    assert modes(tmp_path / "step") == {0o600}


class Broken:
    dtype = torch.float32
    shape = (1 << 12,)

    def read(self, start: int, out: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("way", ["write_safetensors", "save", "save_async", "manager"])
def test_a_first_one_that_fails_leaves_no_folder(tmp_path: Path, way: str, depth: int) -> None:
    ways: dict[str, Callable[[Path], object]] = {
        "write_safetensors": lambda path: checkpoint.write_safetensors({"x": Broken()}, path),
        "save": lambda path: checkpoint.save({"x": Broken()}, path),
        "save_async": lambda path: checkpoint.save_async({"x": Broken()}, path).result(),
        "manager": lambda path: checkpoint.Manager(path).save(1, {"x": Broken()}),
    }
    path = tmp_path.joinpath(*"abc"[:depth])
    with pytest.raises(OSError, match="Input/output"):
        ways[way](path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_of_damaged_data_leaves_no_folder_and_others_stay(tmp_path: Path) -> None:
    checkpoint.save(STATE, tmp_path / "step")
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    (tmp_path / "mine").mkdir()
    for folder in ("out", "mine", "mine/deeper/out"):
        with pytest.raises(checkpoint.CorruptCheckpointError):
            checkpoint.export_safetensors(tmp_path / "step", tmp_path / folder)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "step"]
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("way", [checkpoint.write_safetensors, checkpoint.save])
def test_a_folder_that_another_one_is_about_to_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., object]
) -> None:
    def taken(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "another one is still running")

    monkeypatch.setattr("checkpoint.directory.lock._lock", taken)
    with pytest.raises(BlockingIOError):
        way(STATE, tmp_path / "new")
    assert (tmp_path / "new").is_dir()
