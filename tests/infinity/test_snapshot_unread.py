"""Snapshots that cannot be read, for a moment or by this version: nothing is taken from them, and
nobody is told to drop one that is whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import infinity
from checkpoint import CorruptCheckpointError
from infinity import cli
from infinity.snapshots import entries, known, points
from swap.snapshots.folders import Folders
from tests.support.models import seeded
from tests.support.proof import by_turns
from tests.support.snapshot_runs import (
    ADAMW,
    Net,
    assert_same,
    everything,
    no_room,
    save_and_fail,
    train,
)
from tests.support.training import least_budget

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(_net(), tmp_path_factory.mktemp("least"), optimizer=ADAMW)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory


def _net() -> Callable[[], Net]:
    return lambda: Net(2)


def _block(nvme: Path, host_memory: int, seed: int = 0) -> Any:
    return infinity.offload(seeded(_net(), seed), nvme, host_memory=host_memory, optimizer=ADAMW)


def _take_two(nvme: Path, least: int) -> dict[str, Any]:
    """Snapshots of one moment, which share all that they have on NVMe."""
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("good", extra=2)
        offloaded.snapshot("other")
        return everything(offloaded)


def _check(nvme: Path, least: int, expected: dict[str, Any], name: str = "good") -> None:
    with _block(nvme, least, seed=7) as offloaded:
        offloaded.restore(name)
        assert_same(expected, everything(offloaded))


@contextmanager
def _flipped(nvme: Path) -> Iterator[None]:
    (manifest,) = nvme.rglob("good/manifest.json")
    whole = manifest.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    manifest.write_bytes(damaged)
    yield
    manifest.write_bytes(whole)


@contextmanager
def _failing(_: Path) -> Iterator[None]:
    """Manifests of that name cannot be read, as by a disk that fails for a while."""
    with _errors(errno.EIO):
        yield


@contextmanager
def _errors(number: int, name: str = "good") -> Iterator[None]:
    read = vars(entries)["read_point"]

    def fail(folder: Path) -> Any:
        if folder.name == name:
            raise OSError(number, os.strerror(number), str(folder / "manifest.json"))
        return read(folder)

    with Patch.context() as patch:
        for module in (entries, known):
            patch.setattr(module, "read_point", fail)
        yield


@contextmanager
def _newer(_: Path) -> Iterator[None]:
    """A version reads snapshots that know of no other."""
    read = vars(entries)["read_point"]

    def refuse(folder: Path) -> Any:
        if folder.name == "good":
            raise ValueError(f"{folder} is a snapshot of another version of this library")
        return read(folder)

    with Patch.context() as patch:
        patch.setattr(entries, "read_point", refuse)
        yield


def _drop(offloaded: infinity.OffloadedModel) -> None:
    offloaded.drop_snapshot("other")


def _replace(offloaded: infinity.OffloadedModel) -> None:
    offloaded.restore("other")
    train(offloaded, 2, 3)
    offloaded.snapshot("other")
    train(offloaded, 3, 4)


def _keep(offloaded: infinity.OffloadedModel) -> None:
    offloaded.snapshot("new", keep=1)


@pytest.mark.parametrize(
    ("act", "unread"), by_turns([_drop, _replace, _keep], [_flipped, _failing, _newer])
)
def test_nothing_is_given_back_of_a_snapshot_that_cannot_be_read(
    act: Callable[[Any], None], unread: Callable[[Path], Any], least: int, nvme: Path
) -> None:
    expected = _take_two(nvme, least)
    with unread(nvme):
        with _block(nvme, least, seed=3) as offloaded:
            act(offloaded)
        assert cli.main(["snapshots", os.fspath(nvme), "--drop", "none"]) == 1
    _check(nvme, least, expected)


def test_nothing_is_given_back_of_a_snapshot_of_which_a_file_was_not_there(
    least: int, nvme: Path, monkeypatch: Patch
) -> None:
    expected = _take_two(nvme, least)
    looks = iter([True])
    file = Folders.file

    def is_missed_once(folders: Folders, name: str) -> Any:
        return None if next(looks, False) else file(folders, name)

    with _block(nvme, least, seed=3) as offloaded:
        monkeypatch.setattr(Folders, "file", is_missed_once)
        offloaded.drop_snapshot("other")
        offloaded.restore("good")
        assert_same(expected, everything(offloaded))
    _check(nvme, least, expected)


def test_nothing_is_given_back_where_the_folder_of_snapshots_is_gone_for_a_while(
    least: int, nvme: Path
) -> None:
    expected = _take_two(nvme, least)
    (folder,) = nvme.rglob("points")
    with _block(nvme, least, seed=3):
        pass
    away = folder.rename(nvme / "away")
    with _block(nvme, least, seed=3) as offloaded, pytest.raises(FileNotFoundError, match="points"):
        offloaded.snapshot("other")
    away.rename(folder)
    _check(nvme, least, expected)


def test_space_of_a_damaged_snapshot_comes_back_when_it_is_dropped(least: int, nvme: Path) -> None:
    _take_two(nvme, least)
    (manifest,) = nvme.rglob("good/manifest.json")
    manifest.write_bytes(b"damaged")
    with _block(nvme, least, seed=3) as offloaded:
        offloaded.drop_snapshot("good")
        (kept,) = nvme.rglob(".infinity/snapshots-*/*/*.swap")
        before = kept.stat().st_blocks
        offloaded.drop_snapshot("other")
        assert kept.stat().st_blocks < before
    assert not kept.exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_error_that_passes_is_raised_as_it_is_and_forgotten(
    number: int, least: int, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _take_two(nvme, least)
    with _block(nvme, least, seed=3) as offloaded:
        with _errors(number):
            calls: list[Callable[[], object]] = [
                lambda: offloaded.restore("good"),
                lambda: offloaded.snapshot("good"),
                offloaded.snapshots,
            ]
            for call in calls:
                with pytest.raises(OSError, match="good") as caught:
                    call()
                assert caught.value.errno == number
            offloaded.restore("other")
        assert "drop_snapshot" not in caplog.text
        assert offloaded.restore("good") == 2
        assert_same(expected, everything(offloaded))
        offloaded.snapshot("good", extra=3)
        assert [one.name for one in offloaded.snapshots()] == ["other", "good"]


def test_snapshot_taken_while_others_cannot_be_read_is_the_newest(least: int, nvme: Path) -> None:
    _take_two(nvme, least)
    with _block(nvme, least, seed=3) as offloaded:
        with _errors(errno.EIO, "other"), _flipped(nvme):
            offloaded.snapshot("new")
        assert [one.name for one in offloaded.snapshots()] == ["good", "other", "new"]
        offloaded.snapshot("newest", keep=2)
        assert [one.name for one in offloaded.snapshots()] == ["new", "newest"]


def test_read_that_goes_wrong_once_is_not_taken_for_damage(
    least: int, nvme: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    _take_two(nvme, least)
    faults = iter([True])
    read = entries.read_point

    def wrong_once(folder: Path) -> Any:
        if folder.name == "good" and next(faults, False):
            raise CorruptCheckpointError("the manifest is empty", path=folder)
        return read(folder)

    with _block(nvme, least, seed=3) as offloaded:
        monkeypatch.setattr(entries, "read_point", wrong_once)
        assert offloaded.restore("good") == 2
    assert "drop_snapshot" not in caplog.text


def test_damaged_snapshot_that_is_put_right_is_restored_in_the_same_block(
    least: int, nvme: Path
) -> None:
    expected = _take_two(nvme, least)
    with _block(nvme, least, seed=3) as offloaded:
        with _flipped(nvme):
            for _ in range(2):
                with pytest.raises(CorruptCheckpointError, match="manifest"):
                    offloaded.restore("good")
            with pytest.raises(CorruptCheckpointError, match="drop_snapshot"):
                offloaded.snapshot("good")
        offloaded.restore("good")
        assert_same(expected, everything(offloaded))


def test_snapshot_that_failed_behind_its_rename_is_known_to_its_block_and_later_ones(
    least: int, nvme: Path, monkeypatch: Patch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        train(offloaded, 1, 2)
        expected = everything(offloaded)
        with monkeypatch.context() as patch:
            patch.setattr(points, "save_on", save_and_fail)
            for name in ("a", "b"):
                with pytest.raises(OSError, match="cannot be synced"):
                    offloaded.snapshot(name)
            with _errors(errno.EIO, "c"), pytest.raises(OSError, match="cannot be synced"):
                offloaded.snapshot("c")
        train(offloaded, 2, 5)
        for name in ("a", "b", "c"):
            offloaded.restore(name)
            assert_same(expected, everything(offloaded))
            train(offloaded, 2, 3)
        for name in ("b", "c"):
            offloaded.drop_snapshot(name)
    _check(nvme, least, expected, "a")
    with _block(nvme, least) as offloaded:
        offloaded.drop_snapshot("a")
    assert list(nvme.rglob("*")) == []


def test_name_of_a_snapshot_that_failed_while_nobody_could_look_for_it_is_free(
    least: int, nvme: Path, monkeypatch: Patch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(points, "save_on", no_room)
            with _errors(errno.EIO), pytest.raises(OSError, match="no room"):
                offloaded.snapshot("good")
        with pytest.raises(FileNotFoundError, match="there is no snapshot good"):
            offloaded.restore("good")
        offloaded.snapshot("good", extra=1)
        assert offloaded.restore("good") == 1
        offloaded.drop_snapshot("good")
    assert list(nvme.iterdir()) == []


def test_snapshot_whose_manifest_cannot_be_read_at_all_is_dropped(
    least: int, nvme: Path, monkeypatch: Patch
) -> None:
    expected = _take_two(nvme, least)

    def fail(folder: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with _errors(errno.EIO), _block(nvme, least, seed=3) as offloaded:
        with monkeypatch.context() as patch:
            patch.setattr(entries, "read_manifest", fail)
            offloaded.drop_snapshot("good")
        assert [one.name for one in offloaded.snapshots()] == ["other"]
    _check(nvme, least, expected, "other")


def test_command_names_directories_that_are_not_there_and_snapshots_of_others(
    least: int, nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more"
    more.mkdir()
    options = {"host_memory": least, "optimizer": ADAMW}
    with infinity.offload(seeded(_net(), 0), [nvme, more], **options) as offloaded:  # type: ignore[arg-type]
        offloaded.snapshot("a")
    (tmp_path / "file").touch()
    for name in ("typo", "file"):
        assert cli.main(["snapshots", os.fspath(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err
    assert cli.main(["snapshots", os.fspath(nvme), os.fspath(more), "--drop", "a"]) == 0
    assert [*nvme.iterdir(), *more.iterdir()] == []
