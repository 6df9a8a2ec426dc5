"""What anything of this process finds damaged does not count as kept, for any manager."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from aio.process.descriptors import Descriptor
from checkpoint.dcp import StorageReader
from checkpoint.directory.locate import read_manifest
from checkpoint.known import damage, manifests
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.watched_loads import WatchedLoads
from checkpoint.loading.chunks import ChunkReader
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of two steps, of which the second is damaged where only reading it all tells."""
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (file,) = manager.path(2).rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    return tmp_path / "run"


def _from_dcp(path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(4)}
    dcp_load(state, storage_reader=StorageReader(path))


def _from_open(path: Path) -> None:
    with checkpoint.open(path) as opened:
        opened["w"][1:]


def _from_zarr(path: Path) -> None:
    array: Any = checkpoint.open_zarr(path)["w"]
    array[...]


WAYS: dict[str, Callable[[Path], object]] = {
    "another manager": lambda path: checkpoint.Manager(path.parent).load(),
    "another manager, by number": lambda path: checkpoint.Manager(path.parent).load(2),
    "load": checkpoint.load,
    "verify": checkpoint.verify,
    "open": _from_open,
    "zarr": _from_zarr,
    "export": lambda path: checkpoint.export_safetensors(path, path.parent.parent / "out"),
    "torch.distributed": _from_dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_damage_that_is_found_by_any_way_keeps_the_sound_step(root: Path, way: str) -> None:
    with suppress(BaseException):  # DCP has a kind of its own
        WAYS[way](root / "step-2")
    manager = checkpoint.Manager(root, keep=2)
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]


def break_file(patch: pytest.MonkeyPatch, file: Path, code: int) -> None:
    """The file opens no more, as one on a sector that is gone."""
    really = Descriptor.open

    def broken(self: Descriptor, path: Any, *arguments: Any, **options: Any) -> None:
        if os.fspath(path) == str(file):
            raise OSError(code, os.strerror(code), os.fspath(path))
        really(self, path, *arguments, **options)

    patch.setattr(Descriptor, "open", broken)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_read_by_any_way_keeps_the_sound_step(
    root: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, {"w": torch.full((4,), 2.0)})
    (file,) = manager.path(2).rglob("*.safetensors")
    with monkeypatch.context() as patch, suppress(BaseException):
        break_file(patch, file, errno.EIO)
        WAYS[way](manager.path(2))
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]
    checkpoint.verify(manager.path(2))
    manager.save(4, {"w": torch.zeros(4)})
    assert manager.steps() == [3, 4]


def test_what_cannot_be_read_once_it_is_open_keeps_the_sound_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, {"w": torch.full((4,), 2.0)})
    (file,) = manager.path(2).rglob("*.safetensors")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    with checkpoint.open(manager.path(2)) as opened, monkeypatch.context() as patch:
        patch.setattr(ChunkReader, "read_chunk", broken)
        with pytest.raises(OSError, match="Input/output error"):
            opened["w"][1:]
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_an_error_of_the_process_is_none_of_the_step_that_it_reads(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, {"w": torch.full((4,), 2.0)})
    (file,) = manager.path(2).rglob("*.safetensors")
    with monkeypatch.context() as patch:
        break_file(patch, file, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            checkpoint.load(manager.path(2))
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [2, 3]


def _link(path: Path) -> None:
    shutil.copytree(path, path.parent.parent / "copy", copy_function=os.link)


TOUCHES: dict[str, Callable[[Path], object]] = {
    "permissions": lambda path: (path / "manifest.json").chmod(0o600),
    "owner": lambda path: os.chown(path / "manifest.json", os.getuid(), os.getgid()),
    "links": _link,
    "times": lambda path: os.utime(path / "manifest.json"),
    "name of the series": lambda path: path.parent.rename(path.parent.parent / "moved"),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_damage_is_known_still_when_attributes_of_the_manifest_have_changed(
    root: Path, touch: str
) -> None:
    assert checkpoint.Manager(root, keep=2).load()["w"][0] == 1
    TOUCHES[touch](root / "step-2")
    root = next(path for path in (root, root.parent / "moved") if path.exists())
    manager = checkpoint.Manager(root, keep=2)
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]


def test_damage_is_known_still_while_the_manifest_cannot_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not checkpoint.verify(root / "step-2")

    def broken(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "read_manifest", broken)
        assert WatchedLoads(KnownManifests()).was_damaged(root / "step-2")
    assert WatchedLoads(KnownManifests()).was_damaged(root / "step-2")


def test_damage_is_not_that_of_another_save_in_the_same_file(root: Path) -> None:
    assert not checkpoint.verify(root / "step-2")
    other = checkpoint.save({"w": torch.zeros(4)}, root / "other").uuid
    text = (root / "other" / "manifest.json").read_bytes()
    (root / "other" / other).rename(root / "step-2" / other)
    (root / "step-2" / "manifest.json").write_bytes(text)
    assert not WatchedLoads(KnownManifests()).was_damaged(root / "step-2")


def test_damage_that_is_found_while_a_header_is_read_keeps_the_sound_step(root: Path) -> None:
    (file,) = (root / "step-2").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(40)
        opened.write(b"x")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="header"):
        checkpoint.open(root / "step-2")
    checkpoint.Manager(root, keep=2).save(3, {"w": torch.zeros(4)})
    assert checkpoint.Manager(root).steps() == [1, 2, 3]


def test_damage_of_a_save_that_was_replaced_is_none_of_what_replaced_it(root: Path) -> None:
    manager = checkpoint.Manager(root, keep=2)
    with checkpoint.open(root / "step-2") as opened:
        manager.save(2, {"w": torch.full((4,), 2.0)})
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC-32C"):
            opened["w"][...]
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [2, 3]


def test_step_that_is_saved_again_counts_as_any_other(root: Path) -> None:
    assert not checkpoint.verify(root / "step-2")
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, {"w": torch.zeros(4)})
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [2, 3]


def test_step_that_was_repaired_counts_when_all_of_it_was_read(root: Path) -> None:
    (file,) = (root / "step-2").rglob("*.safetensors")
    assert not checkpoint.verify(root / "step-2")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(torch.full((4,), 2.0).numpy().tobytes())
    checkpoint.load(root / "step-2")
    checkpoint.Manager(root, keep=2).save(3, {"w": torch.zeros(4)})
    assert checkpoint.Manager(root).steps() == [2, 3]


SAVES: dict[str, Callable[[Path], object]] = {
    name: WAYS[name] for name in ("another manager", "load", "verify", "open", "torch.distributed")
}


def _replace(path: Path) -> None:
    checkpoint.save({"w": torch.zeros(4)}, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", SAVES)
def test_damage_that_is_noted_when_another_save_is_there_is_none_of_that(
    root: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It takes its place between the last look at the manifest and the note."""
    if way == "open":
        (file,) = (root / "step-2").rglob("*.safetensors")
        with file.open("r+b") as opened:
            opened.seek(40)
            opened.write(b"x")
    saved: list[Path] = []
    really = damage._place

    def place(path: Path) -> Any:
        if not saved:
            saved.append(path)
            _replace(path)
        return really(path)

    monkeypatch.setattr(damage, "_place", place)
    with suppress(BaseException):
        SAVES[way](root / "step-2")
    assert saved == [root / "step-2"]
    assert not WatchedLoads(KnownManifests()).was_damaged(root / "step-2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_damage_that_dcp_finds_as_a_save_takes_its_place_is_none_of_that(root: Path) -> None:
    path = root / "step-2"

    class Planner(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            _replace(path)
            return super().finish_plan(new_plan)

    state: dict[str, Any] = {"w": torch.zeros(4)}
    with pytest.raises(BaseException, match="saved over"):
        dcp_load(state, storage_reader=StorageReader(path), planner=Planner())
    assert not WatchedLoads(KnownManifests()).was_damaged(path)


def test_a_whole_load_forgets_no_damage_of_what_took_its_place(root: Path) -> None:
    """What is in the place of the save that was read may be damaged."""
    path, sound = root / "step-2", root / "step-1"
    assert not checkpoint.verify(path)
    with damage.damage_noted(path) as read:
        read.by(lambda _: None)(read_manifest(sound))
        read.is_all = True
    assert WatchedLoads(KnownManifests()).was_damaged(path)


def test_what_another_rank_finds_damaged_is_that_of_the_save_that_was_loaded(root: Path) -> None:
    loads, path = WatchedLoads(KnownManifests()), root / "step-2"
    loads.look_before(path)
    _replace(path)
    loads.note_damage(path, {})
    assert not loads.was_damaged(path)
    loads.look_before(path)
    loads.note_damage(path, {})
    assert loads.was_damaged(path)


def test_damage_of_a_file_that_was_replaced_by_a_sound_one_is_known_no_more(root: Path) -> None:
    path = root / "step-1"
    (file,) = path.rglob("*.safetensors")
    with checkpoint.open(path) as opened:
        sound = file.read_bytes()
        with file.open("r+b") as damaged:
            damaged.seek(4096)
            damaged.write(b"x")
        (root / "sound").write_bytes(sound)
        (root / "sound").replace(file)
        assert checkpoint.verify(path)
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC-32C"):
            opened["w"][...]
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC-32C"):
            opened["w"][1:]
    assert not WatchedLoads(KnownManifests()).was_damaged(path)
