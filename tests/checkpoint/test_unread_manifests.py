"""A step whose manifest cannot be read does not count as kept, whatever was known of it before."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import checkpoint
from checkpoint.dcp import StorageReader
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.known import damage as known_damage
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.watched_loads import WatchedLoads
from tests.checkpoint.test_damage_of_copies import damage, make_steps
from tests.checkpoint.test_known_damage import WAYS, break_file
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

READS: dict[str, Callable[[Path], object]] = {
    **WAYS,
    "list_tensors": checkpoint.list_tensors,
    "another manager, latest": lambda path: checkpoint.Manager(path.parent).latest(),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", READS)
def test_a_manifest_that_cannot_be_read_any_more_keeps_the_sound_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    manager = make_steps(tmp_path / "run")
    with monkeypatch.context() as patch:
        break_file(patch, manager.path(2) / MANIFEST_NAME, errno.EIO)
        with suppress(BaseException):  # DCP has a kind of its own
            READS[way](manager.path(2))
        manager.save(3, {"w": torch.zeros(4)})
        assert manager.latest() == 3
        assert manager.steps() == [1, 3]
    assert manager.steps() == [1, 2, 3]
    manager.retire()
    assert manager.steps() == [2, 3]


def test_data_that_cannot_be_read_are_known_also_where_the_manifest_cannot_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk hangs for a while, and answers again."""
    manager = make_steps(tmp_path / "run")
    (file,) = manager.path(2).rglob("*.safetensors")

    def unreadable(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path / MANIFEST_NAME))

    with monkeypatch.context() as patch:
        break_file(patch, file, errno.EIO)
        patch.setattr(known_damage, "read_manifest", unreadable)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoint.load(manager.path(2))
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]


class Interrupt(BaseException):
    """Raised by the handler."""


@pytest.fixture
def alarmed() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


def _from_dcp(path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(4)}
    planner = DefaultLoadPlanner()
    reader = StorageReader(path)
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner)


ENTRANCES: dict[str, Callable[[Path], object]] = {
    "load": checkpoint.load,
    "by number": lambda path: checkpoint.Manager(path.parent).load(2),
    "verify": checkpoint.verify,
    "torch.distributed": _from_dcp,
}


@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("way", ENTRANCES)
def test_damage_that_is_found_as_an_interrupt_comes_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = make_steps(tmp_path / "run").path(2)
    damage(path)
    really = known_damage._may_be_at

    def interrupted(*arguments: Any) -> bool:
        signal.raise_signal(signal.SIGALRM)
        return really(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(known_damage, "_may_be_at", interrupted)
        with pytest.raises(Interrupt):
            ENTRANCES[way](path)
    assert WatchedLoads(KnownManifests()).was_damaged(path)


@pytest.mark.parametrize("call", ["save", "retire"])
def test_a_step_of_links_to_what_is_not_there_for_a_moment_stays(tmp_path: Path, call: str) -> None:
    """As `cp -rs` and tools for large files make them, of a disk that is not mounted just now."""
    disk, away = tmp_path / "disk", tmp_path / "away"
    checkpoint.save({"w": torch.ones(4)}, disk)
    linked = tmp_path / "run" / "step-1"
    linked.mkdir(parents=True)
    for entry in disk.iterdir():
        (linked / entry.name).symlink_to(entry)
    disk.rename(away)
    manager = checkpoint.Manager(tmp_path / "run")
    if call == "save":
        manager.save(2, {"w": torch.zeros(4)})
    else:
        manager.retire()
    assert manager.latest() == (2 if call == "save" else None)
    away.rename(disk)
    assert 1 in manager.steps()
