"""Series of checkpoints: what is kept, what is passed over, what is cleaned up."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import checkpoint
from aio import Slab
from checkpoint.directory import lock
from checkpoint.directory.locate import read_manifest
from checkpoint.format.records import Manifest
from checkpoint.known import manifests
from checkpoint.transfer.memory import KeptMemory
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


def damage_data(path: Path) -> None:
    (file,) = path.rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"damage")


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def test_an_empty_root_has_nothing_to_load(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path / "run")
    assert manager.steps() == []
    assert manager.latest() is None
    with pytest.raises(FileNotFoundError, match="run"):
        manager.load()


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_are_kept_and_every_nth(tmp_path: Path, background: bool) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=2, keep_every=40)
    for step in range(0, 110, 10):
        if background:
            manager.save_async(step, state(step)).result()
        else:
            manager.save(step, state(step))
    assert manager.steps() == [0, 40, 80, 90, 100]
    assert names(tmp_path / "run") == {f"step-{k}" for k in manager.steps()}
    assert len(list(stripes[0].iterdir())) == 5, "the data of removed ones is gone too"
    assert manager.latest() == 100
    assert manager.load()["step"] == 100
    assert manager.load(40, only="step") == {"step": 40}


def test_background_copies_use_the_same_memory_again(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path)
    slabs = set[int]()
    for step in range(3):
        state_of_step = state(step)
        pending = manager.save_async(step, state_of_step)
        state_of_step["w"].zero_()
        pending.result()
        slabs.update(map(id, manager._memory._slabs))
    assert len(slabs) == 1
    for step in range(3):
        assert bool((manager.load(step)["w"] == step).all())
    larger = {"w": torch.ones(500_000)}
    manager.save_async(3, larger).result()
    assert bool((manager.load(3)["w"] == 1).all())


def test_background_saves_of_two_threads_at_once_take_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, both, take = checkpoint.Manager(tmp_path), threading.Barrier(2), KeptMemory.take
    manager.save_async(1, state(1)).result()

    def take_at_once(memory: KeptMemory, nbytes: int) -> Slab:
        slab = take(memory, nbytes)
        both.wait(10)
        return slab

    monkeypatch.setattr(KeptMemory, "take", take_at_once)
    with ThreadPoolExecutor(2) as threads:
        saves = [threads.submit(manager.save_async, step, state(step)) for step in (2, 3)]
        for save in saves:
            save.result().result()
    assert [manager.load(step)["w"][0] for step in manager.steps()] == [1, 2, 3]


def test_what_was_found_whole_is_looked_at_again(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=None)
    for step in (1, 2, 3):
        manager.save_async(step, state(step)).result()
    assert manager.steps() == [1, 2, 3]
    (data,) = manager.path(3).rglob("*.safetensors")
    data.unlink()
    assert manager.steps() == [1, 2]
    manifest = manager.path(2) / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"world_size":1', b'"world_size":2'))
    assert manager.steps() == [1]
    manifest.write_bytes(text)
    assert manager.steps() == [1, 2]
    shutil.rmtree(manager.path(2))
    assert manager.latest() == 1


def test_saves_in_a_series_do_not_read_the_manifests_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noted(path: Path) -> Manifest:
        read.append(path)
        return read_manifest(path)

    monkeypatch.setattr(manifests, "read_manifest", noted)
    checkpoint.Manager(tmp_path, keep=2).save_async(1, state(1)).result()
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (2, 3, 4, 5):
        manager.save_async(step, state(step)).result()
    assert manager.steps() == [4, 5]
    assert read == [manager.path(1)], "one from before this manager is read once, its own never"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, {"x": 1})
    manager.save(1, {"x": 2})
    assert manager.steps() == [1]
    assert manager.load() == {"x": 2}


def test_damaged_ones_are_reported_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=10)
    for step in range(1, 7):
        manager.save(step, state(step))
    (manager.path(6) / "manifest.json").write_text("{}")
    os.truncate(next(manager.path(5).rglob("*.safetensors")), 4096)
    shutil.rmtree(manager.path(4) / next(p.name for p in manager.path(4).iterdir() if p.is_dir()))
    damage_data(manager.path(3))
    assert manager.latest() == 3, "its manifest and its files' sizes are as they should be"
    assert manager.steps() == [1, 2, 3]
    caplog.clear()
    assert manager.load()["step"] == 2
    reported = [record.getMessage() for record in caplog.records]
    assert [step for step in range(1, 7) if any(f"step-{step} " in text for text in reported)] == [
        3,
        4,
        5,
        6,
    ]
    manager.save(7, state(7))
    assert {"step-3", "step-6"} <= names(tmp_path), "damaged ones are left for somebody to look at"
    with pytest.raises(checkpoint.CorruptCheckpointError):
        manager.load(3)


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2):
        manager.save(step, state(step))
    (manager.path(2) / "manifest.json").write_text("{}")
    manager.save(3, state(3))
    assert manager.steps() == [1, 3]


def test_unfinished_ones_are_removed_and_other_things_left_alone(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path)
    unfinished = tmp_path / "step-5" / "0badc0de"
    unfinished.mkdir(parents=True)
    (unfinished / "r0-0.safetensors").write_bytes(b"part of a file")
    for name in ("step-x", "step-07", "notes"):
        (tmp_path / name).mkdir()
    assert manager.latest() is None
    manager.save(6, state(6))
    assert names(tmp_path) == {"step-6", "step-x", "step-07", "notes"}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("background", [False, True])
def test_what_killed_saves_left_is_out_of_the_way_before_the_next_one_takes_room(
    tmp_path: Path, background: bool, is_new: bool
) -> None:
    """Also of a process that was killed while this one was there."""
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, state(1))
    for name in ("step-5/0badc0de", "step-6/0badc0de"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "r0-0.safetensors").write_bytes(b"part of a file")
    found: list[set[str]] = []

    class Source:
        dtype = torch.uint8
        shape = (3,)

        def read(self, start: int, out: memoryview) -> None:
            found.append(names(tmp_path))
            raise RuntimeError("gone")

    def save(manager: checkpoint.Manager) -> None:
        if background:
            manager.save_async(6, {"x": Source()}).result()
        else:
            manager.save(6, {"x": Source()})

    with pytest.raises(RuntimeError, match="gone"):
        save(checkpoint.Manager(tmp_path) if is_new else manager)
    assert found == [{"step-1", "step-6"}]
    assert names(tmp_path) == {"step-1", "step-6"}
    assert [entry.name for entry in (tmp_path / "step-6").iterdir()] == []


def test_a_step_being_saved_is_not_taken_for_an_orphan(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path)

    class Source:
        dtype = torch.uint8
        shape = (3,)

        def read(self, start: int, out: memoryview) -> None:
            checkpoint.Manager(tmp_path).save(1, state(1))

    manager.save(2, {"x": Source()})
    assert manager.steps() == [1, 2]


def test_a_failed_save_leaves_the_series_as_it_was(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))

    class Source:
        dtype = torch.uint8
        shape = (3,)

        def read(self, start: int, out: memoryview) -> None:
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        manager.save(2, {"x": Source()})
    with pytest.raises(RuntimeError, match="gone"):
        manager.save_async(3, {"x": Source()}).result()
    assert names(tmp_path) == {"step-1"}
    assert manager.load()["step"] == 1


class Room(NamedTuple):
    f_bavail: int
    f_frsize: int
    f_blocks: int


def test_a_save_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))
    monkeypatch.setattr("os.statvfs", lambda path: Room(2, 4096, 100))
    with pytest.raises(OSError, match="needs 24576 bytes, 8192 are free") as caught:
        manager.save(2, state(2))
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == {"step-1"}
    monkeypatch.setattr("os.statvfs", lambda path: Room(0, 4096, 0))
    manager.save(2, state(2))


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.Manager(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep_every=0"):
        checkpoint.Manager(tmp_path, keep_every=0)
    for step in (-1, 1.5, True):
        with pytest.raises(ValueError, match="step="):
            checkpoint.Manager(tmp_path).save(step, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 10**18 - 1, 10**18, 2**63 - 1, 10**19 - 1])
def test_every_step_that_is_saved_is_found(tmp_path: Path, step: int) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(step, state(7))
    assert manager.steps() == [step]
    assert manager.latest() == step
    assert manager.load()["step"] == 7


@pytest.mark.parametrize("step", [10**19, -1, True, "3", 2.0])
def test_what_could_not_be_found_again_is_not_saved(tmp_path: Path, step: Any) -> None:
    manager = checkpoint.Manager(tmp_path / "run")
    for save in (manager.save, manager.save_async):
        with pytest.raises(ValueError, match="step="):
            save(step, state(0))
    assert not (tmp_path / "run").exists()


def test_retiring_leaves_what_another_thread_begins_to_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    manager.save(1, state(1))
    seen: list[bool] = []
    take = lock._lock

    def taking(descriptor: int, path: Path, by: str) -> None:
        if path == manager.path(2) and not seen:
            seen.append(path.is_dir())
            manager.retire()  # the folder is made, and not locked yet
            seen.append(path.is_dir())
        take(descriptor, path, by)

    monkeypatch.setattr(lock, "_lock", taking)
    manager.save(2, state(2))
    assert seen == [True, True]
    assert manager.steps() == [2]


@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_removed_is_told_once_a_save(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
) -> None:
    left = tmp_path / "step-5" / "0badc0de"
    left.mkdir(parents=True)
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if path == "r0-0.safetensors":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, **options)

    (left / "r0-0.safetensors").write_bytes(b"part of a file")
    monkeypatch.setattr(os, "unlink", refused)
    manager = checkpoint.Manager(tmp_path)
    for step in (1, 2):
        caplog.clear()
        if background:
            manager.save_async(step, state(step)).result()
        else:
            manager.save(step, state(step))
        (told,) = (text for text in caplog.messages if "removed" in text)
        assert f"{left.parent}: cannot be removed" in told
    caplog.clear()
    manager.retire()
    assert len(caplog.messages) == 1, "who asks for it is told again"
    monkeypatch.undo()
    manager.retire()
    assert names(tmp_path) == {"step-1", "step-2"}


def test_steps_that_were_whole_are_not_looked_at_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of `save_async` waits, and many steps on a network take as many answers of it."""
    manager = checkpoint.Manager(tmp_path, keep=None)
    for step in range(5):
        manager.save(step, state(step))
    looks = list[str]()
    look = os.stat

    def counted(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if threading.current_thread().name == "checkpoint-retire":
            looks.append(os.fspath(path))
        return look(path, *args, **options)

    monkeypatch.setattr(os, "stat", counted)
    manager.save_async(9, state(9)).result()
    assert not [path for path in looks if "step-" in path]
