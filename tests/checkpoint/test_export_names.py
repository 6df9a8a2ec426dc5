"""Exports that could not be read, or not be made, are refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint.interop.shard_folder import INDEX_NAME
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("__metadata__", ValueError, "safetensors keeps this name"),
        ("a\ud800", ValueError, "half of a surrogate pair"),
        (3, TypeError, "cannot write 3: the name of a tensor is a string"),
        (None, TypeError, "cannot write None"),
    ],
)
def test_a_name_that_no_reader_gives_back_is_refused(
    tmp_path: Path, name: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        checkpoint.write_safetensors({name: torch.ones(2), "b": torch.zeros(1)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prefix_that_takes_off_what_made_a_name_legal_is_refused(tmp_path: Path) -> None:
    state = {"model": {"__metadata__": torch.ones(2), "w": torch.ones(1)}}
    checkpoint.save(state, tmp_path / "step")
    with pytest.raises(ValueError, match="another prefix="):
        checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out", prefix="model.")
    (file, _) = checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out")
    assert set(load_file(file)) == {"model.__metadata__", "model.w"}


@pytest.mark.parametrize("name", ["", "__pad__x", "ü", '"\\\0', "😀"])
def test_any_other_name_is_given_back(tmp_path: Path, name: str) -> None:
    (file, _) = checkpoint.write_safetensors({name: torch.ones(2)}, tmp_path)
    assert set(load_file(file)) == {name}


def test_a_pipe_where_the_index_is_to_be_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_NAME)
    checkpoint.write_safetensors({"a": torch.ones(1)}, tmp_path)
    assert (tmp_path / INDEX_NAME).is_file()


@pytest.mark.parametrize("place", [INDEX_NAME, "model.safetensors"])
def test_a_directory_where_a_file_is_to_be_is_refused(tmp_path: Path, place: str) -> None:
    checkpoint.write_safetensors({"a": torch.ones(1)}, tmp_path / "out")
    (tmp_path / "out" / place).unlink()
    (tmp_path / "out" / place).mkdir()
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(IsADirectoryError, match=place):
        checkpoint.write_safetensors({"a": torch.zeros(1)}, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize(
    ("path", "kind", "match"),
    [
        ("s3://bucket/x", ValueError, "is a URL"),
        ("", ValueError, "is empty"),
        (None, TypeError, "is a NoneType, not a path"),
        (5, TypeError, "is a int, not a path"),
    ],
)
def test_what_is_no_path_of_a_file_system_is_refused(
    tmp_path: Path, path: Any, kind: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save({"w": torch.ones(2)}, "step")
    with pytest.raises(kind, match=f"folder.*{match}"):
        checkpoint.write_safetensors({"w": torch.ones(2)}, path)
    with pytest.raises(kind, match=f"folder.*{match}"):
        checkpoint.export_safetensors("step", path)
    with pytest.raises(kind, match=f"file.*{match}"):
        checkpoint.write_references("step", path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_a_source_that_does_not_have_all_of_its_bytes_is_refused(tmp_path: Path) -> None:
    class Half:
        dtype, shape, ranges = torch.float32, (4,), ((0, 2),)

        def read(self, start: int, out: memoryview) -> None:
            raise AssertionError("nothing is to be read")

    with pytest.raises(ValueError, match="'p'"):
        checkpoint.write_safetensors({"p": Half()}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_tensors_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    checkpoint.save({"n": 1}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"no tensor is in .*step"):
        checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out")
