"""Exports that take the place of earlier ones: old or new to every reader, whenever it ends."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from aio import sync_directory
from checkpoint.interop import shard_folder
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

NAMES = ("a", "b", "c")
SHARD_BYTES = {1: 1 << 20, 2: 600, 3: 300}
CHANGES = [(2, 2), (2, 1), (1, 2), (1, 1)]
MANY = 1000


class KilledError(BaseException):
    pass


def export(folder: Path, value: float, count: int) -> list[str]:
    """Three tensors of 256 bytes, in `count` shards; gives the names of the files."""
    tensors = {name: torch.full((64,), value) for name in NAMES}
    files = checkpoint.write_safetensors(tensors, folder, max_shard_bytes=SHARD_BYTES[count])
    return [file.name for file in files]


@contextmanager
def failing_at(number: int, *, forever: bool, error: BaseException) -> Iterator[list[int]]:
    """The `number`-th change of a directory fails, or it and all after it."""
    calls = [0]

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number or (forever and calls[0] > number):
                raise error
            return real(*arguments, **options)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "hardlink_to"):
            patch.setattr(Path, name, guard(getattr(Path, name)))
        patch.setattr(shard_folder, "sync_directory", guard(sync_directory))
        yield calls


def values_by_index(folder: Path) -> set[float]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(NAMES)
    read = [load_file(folder / file)[name] for name, file in weight_map.items()]
    return {float(value) for tensor in read for value in tensor}


def values_as_transformers(folder: Path) -> set[float]:
    """It takes the single file, if there is one, and looks at the index else."""
    whole = folder / "model.safetensors"
    if whole.exists():
        return {float(value) for tensor in load_file(whole).values() for value in tensor}
    return values_by_index(folder)


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("is_killed", [True, False])
def test_an_export_that_ends_anywhere_leaves_the_old_tensors_or_the_new_ones(
    tmp_path: Path, before: int, after: int, is_killed: bool
) -> None:
    error = KilledError() if is_killed else OSError(errno.EIO, "Input/output error")
    export(tmp_path / "old", 1.0, before)
    with failing_at(MANY, forever=True, error=error) as steps:
        export(shutil.copytree(tmp_path / "old", tmp_path / "counted"), 2.0, after)
    seen = set()
    for number in range(1, steps[0] + 1):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        with (
            failing_at(number, forever=is_killed, error=error),
            pytest.raises(type(error)),
        ):
            export(folder, 2.0, after)
        for values in (values_by_index(folder), values_as_transformers(folder)):
            assert values in ({1.0}, {2.0}), number
            seen |= values
        files = export(folder, 3.0, 3)
        assert values_by_index(folder) == values_as_transformers(folder) == {3.0}
        assert sorted(file.name for file in folder.iterdir()) == sorted(files)
    assert seen == {1.0, 2.0}


def test_a_failed_export_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    names = export(tmp_path, 1.0, 3)
    for number in range(1, 5):
        with failing_at(number, forever=False, error=OSError(errno.EIO, "Input/output error")):
            with pytest.raises(OSError, match="Input/output"):
                export(tmp_path, 2.0, 2)
            assert values_by_index(tmp_path) == {1.0}
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


def test_shards_have_their_own_names_after_every_export(tmp_path: Path) -> None:
    first = export(tmp_path, 1.0, 3)
    assert first[0] == "model-00001-of-00003.safetensors"
    assert export(tmp_path, 2.0, 3) == first
    assert "passing" not in json.loads((tmp_path / first[-1]).read_text())["metadata"]


def test_shards_have_their_own_names_on_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    for value in (1.0, 2.0):
        files = export(tmp_path, value, 3)
        assert files[0] == "model-00001-of-00003.safetensors"
        assert values_by_index(tmp_path) == {value}
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(files)


def test_a_first_export_that_is_killed_is_no_model_or_whole(tmp_path: Path) -> None:
    for number in range(1, 10):
        folder = tmp_path / str(number)
        with (
            failing_at(number, forever=True, error=KilledError()),
            pytest.raises(KilledError),
        ):
            export(folder, 1.0, 2)
        if (folder / "model.safetensors.index.json").exists():
            assert values_by_index(folder) == {1.0}
        else:
            assert not list(folder.glob("model-0*.safetensors"))


def test_shards_take_the_place_of_an_export_of_nothing(tmp_path: Path) -> None:
    checkpoint.write_safetensors({}, tmp_path)
    tensors = {"a": torch.ones(3), "b": torch.zeros(3)}
    files = checkpoint.write_safetensors(tensors, tmp_path, max_shard_bytes=1)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_files_that_look_like_dated_shards_of_somebody_else_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "model-20261122-00001-of-00003.safetensors"
    theirs.write_bytes(b"theirs")
    export(tmp_path, 1.0, 3)
    export(tmp_path, 2.0, 3)
    assert theirs.read_bytes() == b"theirs"


def test_directories_made_for_an_export_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("checkpoint.directory.files.making.sync_directory", synced.append)
    export(tmp_path / "x" / "y", 1.0, 1)
    assert synced == [tmp_path, tmp_path / "x"]
