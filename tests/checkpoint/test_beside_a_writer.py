"""Readers of a path to which another process saves meanwhile."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.directory import locate
from checkpoint.interop import views
from checkpoint.loading import api


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(value))}


@pytest.fixture
def outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that is saved over behind the back of whoever has just read its manifest, until
    the fourth save.
    """
    path = tmp_path / "run"
    checkpoint.save(state(1), path)
    values = iter(range(2, 5))

    def overtaken(read: Callable[..., Any]) -> Callable[..., Any]:
        def manifest_of_before(*args: Any) -> Any:
            manifest = read(*args)
            for value in values:
                checkpoint.save(state(value), path)
                break
            return manifest

        return manifest_of_before

    monkeypatch.setattr(locate, "read_manifest", overtaken(locate.read_manifest))
    return path


def test_verify_finds_no_damage_in_what_was_replaced(outdated: Path) -> None:
    report = checkpoint.verify(outdated)
    assert report.ok, report


def test_verify_reports_damage_that_stays(tmp_path: Path) -> None:
    checkpoint.save(state(1), tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    (problem,) = checkpoint.verify(tmp_path).problems
    assert "missing" in str(problem)


def test_verify_of_what_is_removed_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))
    read = locate.read_manifest

    def removed(*args: Any) -> Any:
        manifest = read(*args)
        if manager.steps() == [1]:
            manager.save(2, state(2))
        return manifest

    monkeypatch.setattr(locate, "read_manifest", removed)
    with pytest.raises(FileNotFoundError, match="step-1"):
        checkpoint.verify(manager.path(1))


def test_an_export_is_of_what_took_the_place(outdated: Path, tmp_path: Path) -> None:
    checkpoint.export_safetensors(outdated, tmp_path / "shards")
    (file,) = (tmp_path / "shards").glob("*.safetensors")
    assert np.frombuffer(file.read_bytes()[-4:], np.float32)[0] == 4


def test_a_zarr_group_is_of_what_took_the_place(outdated: Path) -> None:
    assert np.all(np.asarray(checkpoint.open_zarr(outdated)["w"]) == 4)


def test_a_checkpoint_that_is_always_saved_over_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(state(1), tmp_path / "run")
    read = locate.read_manifest

    def overtaken(*args: Any) -> Any:
        manifest = read(*args)
        checkpoint.save(state(2), tmp_path / "run")
        return manifest

    monkeypatch.setattr(locate, "_MAX_RETRIES", 2)
    monkeypatch.setattr(locate, "read_manifest", overtaken)
    for reader in (checkpoint.load, checkpoint.verify):
        with pytest.raises(BlockingIOError, match="saved over 2 times"):
            reader(tmp_path / "run")


def test_references_are_of_what_was_opened_whatever_is_saved_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    checkpoint.save(state(1), path)
    references = views._references

    def overtaken(*arguments: Any) -> dict[str, Any]:
        checkpoint.save(state(2), path)
        return references(*arguments)

    monkeypatch.setattr(views, "_references", overtaken)
    file = checkpoint.write_references(path, tmp_path / "references.json")
    assert "w/zarr.json" in json.loads(file.read_text())["refs"]


def test_references_that_cannot_be_written_leave_the_old_file_and_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(state(1), tmp_path / "run")
    file = tmp_path / "references.json"
    file.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*references\.json"):
        checkpoint.write_references(tmp_path / "run", file)
    assert file.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["references.json", "run"]


@pytest.mark.parametrize("kept", ["both", "one"])
def test_into_holds_nothing_of_a_save_that_was_replaced_and_that_the_new_one_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Its files go when some of it was read."""
    path = tmp_path / "saved"
    checkpoint.save({"a": torch.ones(4), "w": torch.ones(4)}, path)
    new = {"a": torch.full((4,), 2.0), "w": torch.full((4,), 2.0)}
    really = api._read_while_planning

    def replaced(*arguments: Any) -> Any:
        found = really(*arguments)
        if arguments[0].tensors and bool((into["a"] == 1).all()):
            checkpoint.save(new if kept == "both" else {"w": new["w"]}, path)
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))
        return found

    into = {"a": torch.zeros(4), "w": torch.zeros(4)}
    monkeypatch.setattr(api, "_read_while_planning", replaced)
    if kept == "both":
        assert checkpoint.load(path, into=into, strict=False)["a"][0] == 2
        return
    with pytest.raises(BlockingIOError, match=r"a of into may hold .* load again") as caught:
        checkpoint.load(path, into=into, strict=False)
    assert caught.value.filename == str(path)
    checkpoint.load(path, into=into, strict=False)
    assert into["w"][0] == 2
