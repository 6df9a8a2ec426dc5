"""A disk with room for one step more than is kept: whatever came between, the next save has it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.known.manifests import KnownManifests
from checkpoint.series import changed
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


class Looking:
    """Says what is there when the save of which it is part has begun."""

    dtype = torch.uint8
    shape = (3,)

    def __init__(self, root: Path) -> None:
        self.found: set[str] = set()
        self._root = root

    def read(self, start: int, out: memoryview) -> None:
        self.found = {entry.name for entry in self._root.iterdir()}
        out[:] = bytes(len(out))


class Killing:
    """Ends the process whose save comes to it."""

    dtype = torch.uint8
    shape = (3,)

    def read(self, _start: int, _out: memoryview) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in(save: Callable[[dict[str, Any]], object]) -> None:
    """A child is killed in this save, when its data have begun."""
    child = os.fork()
    if not child:
        try:
            save({"x": Killing()})
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def save(manager: checkpoint.Manager, step: int, background: bool) -> set[str]:
    """What is beside a save as it takes room."""
    looking = Looking(manager.root)
    if background:
        manager.save_async(step, {"x": looking, "step": step}).result()
    else:
        manager.save(step, {"x": looking, "step": step})
    return looking.found - {f"step-{step}"}


def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One removal of a file of this name fails."""
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if Path(path).name == name:
            monkeypatch.setattr(os, "unlink", unlink)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refused)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["r0-0.safetensors", "manifest.json"])
def test_what_could_not_be_removed_for_a_moment_is_gone_before_the_next_save_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, background: bool
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))
    failing(monkeypatch, name)
    manager.save(2, state(2))
    assert (tmp_path / "step-1").exists()
    assert save(manager, 3, background) == {"step-2"}
    assert manager.steps() == [3]


def test_what_could_not_be_read_for_a_moment_is_gone_before_the_next_save_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))

    def unreadable(path: Path) -> int:
        monkeypatch.setattr("checkpoint.known.retiring.changed", changed)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("checkpoint.known.retiring.changed", unreadable)
    manager.save(2, state(2))
    assert manager.steps() == [1, 2]
    assert save(manager, 3, background=False) == {"step-2"}


def test_what_was_damaged_and_is_whole_again_is_gone_before_the_next_save_takes_room(
    tmp_path: Path,
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(2, state(2))
    (file,) = manager.path(2).glob("*/*.safetensors")
    sound = file.read_bytes()
    file.write_bytes(bytes(len(sound)))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(manager.path(2))
    manager.save(3, state(3))
    assert manager.steps() == [2, 3], "by their files"
    file.write_bytes(sound)
    checkpoint.verify(manager.path(2))
    assert save(manager, 4, background=False) == {"step-3"}


def test_damage_is_told_once_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    (file,) = (tmp_path / "step-2").glob("*/*.safetensors")
    os.truncate(file, 10)
    manager = checkpoint.Manager(tmp_path, keep=1)
    for step in (4, 5):
        caplog.clear()
        manager.save(step, state(step))
        assert len([text for text in caplog.messages if "is passed over" in text]) == 1
    manager.save(2, state(2))
    assert manager.steps() == [2]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("keep_every", [None, 10])
def test_who_is_killed_before_old_steps_go_leaves_room_for_the_next_save(
    tmp_path: Path, keep_every: int | None, background: bool
) -> None:
    """The new step is there, and so are all that it takes the place of."""
    for step in (9, 10, 12, 14):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    manager = checkpoint.Manager(tmp_path, keep=2, keep_every=keep_every)
    assert manager.load()["step"] == 14
    kept = {"step-12", "step-14"} | ({"step-10"} if keep_every else set())
    assert save(manager, 15, background) == kept
    kept = kept - {"step-12"} | {"step-15"}
    assert {entry.name for entry in tmp_path.iterdir()} == kept
    assert manager.load(14)["step"] == 14


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("striped", [False, True])
def test_what_a_killed_save_over_a_step_that_stays_left_is_gone_before_the_next_save_takes_room(
    tmp_path: Path, background: bool, striped: bool
) -> None:
    """The last save of a run is one over its newest step, as a rule."""
    stripe = tmp_path / "stripe"
    stripe.mkdir()
    root, stripes = tmp_path / "run", [stripe] if striped else None
    checkpoint.Manager(root, stripes, keep=1).save(3, state(3))
    killed_in(lambda tree: checkpoint.Manager(root, stripes).save(3, tree))
    assert len(list(root.glob("step-3/*/"))) == 2
    manager = checkpoint.Manager(root, stripes, keep=1)
    looking = Looking(root / "step-3")
    given = {"x": looking, "step": 4}
    if background:
        manager.save_async(4, given).result()
    else:
        manager.save(4, given)
    assert len(looking.found - {"manifest.json"}) == 1
    assert manager.steps() == [4]
    assert len(list(stripe.iterdir())) == striped


def killed_over(path: Path) -> None:
    """A save over a step is killed when its data have begun."""
    killed_in(lambda tree: checkpoint.save(tree, path))
    assert len(list(path.glob("*/"))) == 2


def test_retire_removes_what_a_killed_save_over_a_step_that_stays_left(tmp_path: Path) -> None:
    checkpoint.save(state(1), tmp_path / "step-1")
    killed_over(tmp_path / "step-1")
    manager = checkpoint.Manager(tmp_path)
    manager.retire()
    assert len(list(manager.path(1).glob("*/"))) == 1
    assert manager.load()["step"] == 1


def test_what_killed_saves_left_that_could_not_be_removed_for_a_moment_goes_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(state(1), tmp_path / "step-1")
    killed_over(tmp_path / "step-1")
    manager = checkpoint.Manager(tmp_path, keep=None)
    failing(monkeypatch, "r0-0.safetensors")
    manager.save(2, state(2))
    assert len([text for text in caplog.messages if "cannot remove" in text]) == 1
    assert len(list(manager.path(1).glob("*/"))) == 2
    manager.save(3, state(3))
    assert len(list(manager.path(1).glob("*/"))) == 1
    assert manager.load(1)["step"] == 1


def test_what_a_save_took_the_place_of_and_could_not_remove_for_a_moment_goes_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, state(1))
    failing(monkeypatch, "r0-0.safetensors")
    manager.save(1, state(2))
    assert len(list(manager.path(1).glob("*/"))) == 2
    manager.save(2, state(3))
    assert len(list(manager.path(1).glob("*/"))) == 1
    assert manager.load(1)["step"] == 2


@pytest.mark.parametrize("damage", ["manifest", "unreadable manifest", "leftover", "root"])
def test_what_is_in_the_way_is_told_once_a_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    """Whatever of looking, of clearing and of removing comes upon it."""
    for step in (1, 2):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    killed_over(tmp_path / "step-1")
    manifest = tmp_path / "step-1" / "manifest.json"

    def refuse(owner: Any, name: str, broken: Path) -> None:
        plain = getattr(owner, name)

        def refused(path: Any, *arguments: Any, **options: Any) -> Any:
            if path == broken or path == os.fspath(broken):
                raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
            return plain(path, *arguments, **options)

        monkeypatch.setattr(owner, name, refused)

    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.load()
    match damage:
        case "manifest":
            content = manifest.read_bytes()
            manifest.write_bytes(content[:-1] + b" ")
        case "unreadable manifest":
            refuse(os, "stat", manifest)
            refuse(os, "open", manifest)
        case "root":
            refuse(Path, "iterdir", tmp_path)
        case _:
            home = manifest.parent
            for left in home.glob("*/"):
                refuse(os, "rmdir", left)
    for step in (3, 3):
        caplog.clear()
        manager.save(step, state(step))
        told = ("passed over", "cannot be removed", "cannot remove")
        assert len([text for text in caplog.messages if any(one in text for one in told)]) == 1
    assert checkpoint.load(manager.path(3))["step"] == 3


def test_what_the_run_is_at_stays_where_what_it_passed_over_is_readable_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    manager = checkpoint.Manager(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        saved = KnownManifests.saved

        def unsaid(known: KnownManifests, path: Path) -> int | None:
            return None if path.name == "step-2" else saved(known, path)

        patch.setattr(KnownManifests, "saved", unsaid)
        manager.load(1)
        with pytest.raises(TypeError):
            manager.save(3, {"x": object()})
    assert manager.steps() == [1, 2]


def test_what_another_process_left_goes_after_a_save_that_failed(tmp_path: Path) -> None:
    """Of a step that was whole when it was looked at last."""
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2):
        manager.save(step, state(step))
    (manager.path(1) / "manifest.json").unlink()
    with pytest.raises(TypeError):
        manager.save(3, {"x": object()})
    assert save(manager, 3, background=False) == {"step-2"}


def test_what_another_process_was_about_to_remove_goes_before_the_next_save(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2):
        manager.save(step, state(step))
    checkpoint.save(state(3), tmp_path / "step-3")
    assert manager.load()["step"] == 3
    assert save(manager, 4, background=False) == {"step-2", "step-3"}
    assert manager.steps() == [3, 4]


def test_a_step_that_is_saved_again_stays_until_the_new_one_is_durable(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.load()
    with pytest.raises(TypeError):
        manager.save(1, {"x": object()})
    assert manager.steps() == [1, 3]
    manager.save(1, state(7))
    assert manager.steps() == [1]
    assert manager.load()["step"] == 7


@pytest.mark.parametrize("loads", [True, False])
def test_what_the_run_goes_back_to_stays_until_a_save_comes_through(
    tmp_path: Path, loads: bool
) -> None:
    """So does all that is there where it is not known what the run goes on from."""
    for step in (1, 2, 3):
        checkpoint.save(state(step), tmp_path / f"step-{step}")
    manager = checkpoint.Manager(tmp_path, keep=1)
    if loads:
        manager.load(1)
    for _ in range(2):
        with pytest.raises(TypeError):
            manager.save(2, {"x": object()})
        assert manager.steps() == [1, 2, 3]
    manager.save(4, state(4))
    assert manager.steps() == [4]


def test_a_step_that_stays_is_told_once_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpoint.save(state(step), tmp_path / f"step-{step}")

    def refused(path: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    manager = checkpoint.Manager(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        for step in (2, 2):
            caplog.clear()
            manager.save(step, state(step))
            told = [text for text in caplog.messages if "step-1: cannot be removed" in text]
            assert len(told) == 1
    manager.save(2, state(2))
    assert manager.steps() == [2]


def test_a_number_that_something_else_uses_again_is_looked_at_before_the_next_save(
    tmp_path: Path,
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    for step in (1, 2):
        manager.save(step, state(step))
    checkpoint.save(state(3), manager.path(1))
    manager.load()
    assert save(manager, 9, False) == {"step-1"}


def test_what_others_keep_in_folders_of_old_steps_costs_a_save_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    for step in range(5):
        manager.save(step, state(step))
        (manager.path(step) / "notes.json").write_text("{}")
    synced = list[Path]()
    monkeypatch.setattr("checkpoint.directory.generations.sync_directory", synced.append)
    manager.save(5, state(5))
    assert set(synced) == {manager.path(4)}
    assert all((manager.path(step) / "notes.json").exists() for step in range(5))
