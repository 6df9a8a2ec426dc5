"""Steps of a root that others write to, or that cannot be read for a moment, as they are listed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint import series
from checkpoint.directory import locate
from checkpoint.format.manifest import MANIFEST_NAME
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.mark.parametrize("find", [checkpoint.Manager.latest, checkpoint.Manager.load])
def test_what_was_saved_last_is_found_where_all_that_was_listed_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[checkpoint.Manager], Any]
) -> None:
    """The first steps of the listing; another one stays, for it is a multiple."""
    trainer, manager = (checkpoint.Manager(tmp_path, keep=2, keep_every=100) for _ in range(2))
    for step in (100, 101, 102):
        trainer.save(step, step)
    listed, later = manager._ordered, [103, 104, 105]

    def listing() -> list[list[int]]:
        found = listed()
        while later:
            trainer.save(later[0], later.pop(0))
        return found

    monkeypatch.setattr(manager, "_ordered", listing)
    assert find(manager) == 105
    assert manager.steps() == [100, 104, 105]


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize(
    ("find", "expected"),
    [
        (checkpoint.Manager.latest, 3),
        (checkpoint.Manager.load, 3),
        (checkpoint.Manager.steps, [1, 2, 3]),
    ],
)
def test_an_old_step_that_cannot_be_read_as_it_is_listed_is_not_the_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    code: int,
    find: Callable[[checkpoint.Manager], Any],
    expected: Any,
) -> None:
    """Nor one that can be read again just as it is to be loaded (4)."""
    manager = checkpoint.Manager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, step)
    opened, failures = locate.open_regular_file, [manager.path(1) / MANIFEST_NAME] * times

    def opening(path: Path, **options: Any) -> Any:
        if path in failures:
            failures.remove(path)
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, **options)

    monkeypatch.setattr(locate, "open_regular_file", opening)
    assert find(checkpoint.Manager(tmp_path)) == expected
    assert not failures


def test_a_damaged_step_that_is_saved_anew_meanwhile_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one was gone, and all was listed again."""
    trainer, manager = checkpoint.Manager(tmp_path), checkpoint.Manager(tmp_path)
    for step in (1, 2, 3):
        trainer.save(step, {"w": torch.full((4,), float(step))})
    (data,) = manager.path(3).rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    listed, changes = manager._ordered, [partial(trainer.save, 3, {"w": torch.full((4,), 33.0)})]

    def listing() -> list[list[int]]:
        found = listed()
        if manager.path(2).exists():
            shutil.rmtree(manager.path(2))
        elif changes:
            changes.pop()()
            return listed()
        return found

    monkeypatch.setattr(manager, "_ordered", listing)
    assert manager.load()["w"][0] == 33
    assert manager.loaded == checkpoint.LoadedStep(3, ())


def test_a_manager_remembers_nothing_of_steps_that_others_removed(tmp_path: Path) -> None:
    trainer, manager = checkpoint.Manager(tmp_path, keep=1), checkpoint.Manager(tmp_path)
    for step in range(5):
        trainer.save(step, step)
        assert manager.load() == step
        assert manager.steps() == [step]
    assert set(manager._known._known) == set(manager._loads._before) == {manager.path(4)}
    shutil.rmtree(manager.path(4))
    manager.retire()
    assert not manager._known._known
    assert not manager._loads._before


def test_data_that_go_as_they_are_opened_are_damage_where_their_manifest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a disk that goes: what is removed loses its manifest first."""
    manager = checkpoint.Manager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (data,) = manager.path(2).rglob("*.safetensors")
    checked = locate.check_data_file

    def check_and_go(*given: Any) -> Path:
        path = checked(*given)
        if path == data and path.exists():
            path.rename(tmp_path / "away")
        return path

    monkeypatch.setattr("checkpoint.loading.reading.check_data_file", check_and_go)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="data file is missing") as caught:
        checkpoint.load(manager.path(2))
    assert caught.value.path == str(data)
    (tmp_path / "away").rename(data)
    assert manager.load()["w"][0] == 1
    assert manager.loaded is not None
    assert manager.loaded.passed_over == (2,)


def saved_ahead(root: Path, monkeypatch: pytest.MonkeyPatch) -> checkpoint.Manager:
    """With a step of a host whose clock is ahead, which this process knows nothing of."""
    manager = checkpoint.Manager(root)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 10**12)
        manager.save(1, 1)
    monkeypatch.setattr(series, "_given", [])
    return manager


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_is_later_than_a_step_beside_it_that_cannot_be_read_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Of a host whose clock is ahead: as it is asked when it was saved, or whether that is so."""
    manager = saved_ahead(tmp_path, monkeypatch)
    manifest, opened = manager.path(1) / MANIFEST_NAME, locate.open_regular_file
    sound, failures = [manifest] * failing, [manifest]

    def opening(path: Path, **options: Any) -> Any:
        if path in sound:
            sound.remove(path)
        elif path in failures:
            failures.remove(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, **options)

    monkeypatch.setattr(locate, "open_regular_file", opening)
    manager.save(2, 2)
    assert not failures
    assert checkpoint.Manager(tmp_path).latest() == 2


def test_a_save_is_later_than_steps_of_a_root_that_cannot_be_listed_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a host whose clock is ahead."""
    manager = saved_ahead(tmp_path, monkeypatch)
    listed, failures = series.steps_in, [errno.EIO]

    def listing(root: Path) -> list[int]:
        if failures:
            raise OSError(failures.pop(), "for a moment", str(root))
        return listed(root)

    monkeypatch.setattr(series, "steps_in", listing)
    manager.save(2, 2)
    assert not failures
    assert checkpoint.Manager(tmp_path).latest() == 2


@pytest.mark.parametrize("times", [1, 1000])
def test_a_step_whose_directory_cannot_be_looked_at_is_listed_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, step)
    looked, failures = Path.stat, [manager.path(2)] * times

    def looking(path: Path, **options: Any) -> os.stat_result:
        is_within = times > 1 and manager.path(2) in path.parents
        if path in failures or is_within:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return looked(path, **options)

    opened = locate.open_regular_file

    def opening(path: Path, **options: Any) -> Any:
        if times > 1 and manager.path(2) in path.parents:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", looking)
        patch.setattr(locate, "open_regular_file", opening)
        found = checkpoint.Manager(tmp_path / "run")
        assert found.load() == (2 if times == 1 else 1)
        assert found.loaded is not None
        assert found.loaded.passed_over == (() if times == 1 else (2,))
        if times > 1:
            shutil.rmtree(manager.path(1))
            with pytest.raises(FileNotFoundError, match="damaged or unreadable: steps 2"):
                found.load()
            found.retire()
    assert manager.steps() == ([1, 2] if times == 1 else [2])
