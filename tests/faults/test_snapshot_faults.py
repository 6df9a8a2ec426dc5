"""Snapshots when something goes wrong: training and all earlier ones are whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import infinity
from aio import AioError
from infinity import cli
from infinity.model import training_of
from infinity.snapshots import known, points
from infinity.snapshots.entries import read_entry
from swap.storage.extents import ExtentStore
from tests.support.interrupts import interrupt, sampled
from tests.support.snapshot_runs import (
    ADAMW,
    Net,
    assert_restored,
    assert_same,
    block_of,
    everything,
    left_empty,
    no_room,
    train,
)
from tests.support.training import WHOLE, least_budget

_block = partial(block_of, Net)


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Nothing may stay here but what a test leaves on purpose."""
    with left_empty(tmp_path / "nvme", Net) as directory:
        yield directory


def _trained_past(offloaded: Any, at: int, then: int) -> dict[str, Any]:
    """Train to a snapshot "a" after step ``at``, and on to ``then``; gives what that is of."""
    train(offloaded, 0, at)
    offloaded.snapshot("a")
    expected = everything(offloaded)
    train(offloaded, at, then)
    return expected


def _assert_restored_anew(
    name: str, expected: dict[str, Any], nvme: Path, host_memory: int
) -> None:
    """A block that begins with other values has those of the snapshot."""
    with _block(nvme, host_memory, seed=2) as offloaded:
        assert_restored(offloaded, expected, name)


@pytest.mark.parametrize("place", ["link", "save"])
def test_snapshot_that_fails_leaves_training_and_earlier_ones_whole(
    place: str, least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        if place == "save":
            offloaded.snapshot("a", extra=1)
        first = everything(offloaded)
        train(offloaded, 1, 3)
        before = everything(offloaded)
        where = (os, "link") if place == "link" else (points, "save_on")
        with monkeypatch.context() as patch:
            patch.setattr(*where, no_room)
            for name in ("a", "b"):
                with pytest.raises(OSError, match="no room"):
                    offloaded.snapshot(name)
        assert_same(before, everything(offloaded))
        names = [one.name for one in offloaded.snapshots()]
        assert names == (["a"] if place == "save" else [])
        state = training_of(offloaded).state
        assert state.extents is not None
        if place == "link":
            used = state.extents.used_bytes
            assert used == state.placement.state_nvme_bytes + state.placement.gradient_nvme_bytes
        train(offloaded, 3, 5)
        if place == "save":
            assert_restored(offloaded, first, extra=1)


def test_step_that_finds_no_room_is_forgotten_by_restore(
    least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        expected = _trained_past(offloaded, 2, 4)
        after = everything(offloaded)
        with monkeypatch.context() as patch:
            for name in ("allocate", "allocate_adjacent"):
                patch.setattr(ExtentStore, name, no_room)
            train(offloaded, 4, 5)
            with pytest.raises(AioError, match="no room"):
                offloaded.flush()
            with pytest.raises(AioError, match="no room"):
                offloaded.snapshot("b")
            with pytest.raises(FileNotFoundError, match="no snapshot b"):
                offloaded.restore("b")
            with pytest.raises(AioError, match="no room"):
                offloaded.flush()
            assert_restored(offloaded, expected)
        train(offloaded, 2, 4)
        assert_same(after, everything(offloaded))


def test_block_whose_swap_file_lost_pages_takes_no_snapshot_and_the_next_one_does(
    least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "state.swap":
            raise OSError(errno.EIO, "lost")
        sync(descriptor)

    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lose)
            with pytest.raises(AioError, match=r"nor can a later snapshot of this block"):
                offloaded.snapshot("one")
        with pytest.raises(AioError, match=r"leave the block for another one on disks that"):
            offloaded.snapshot("one")
        pending = offloaded.snapshot("two", block=False)
        with pytest.raises(AioError, match=r"leave the block for another one on disks that"):
            pending.result()
        assert offloaded.snapshots() == []
        offloaded.save(tmp_path / "saved")
        expected = everything(offloaded)
    with _block(nvme, least, seed=2) as offloaded:
        offloaded.load(tmp_path / "saved")
        offloaded.snapshot("one")
    _assert_restored_anew("one", expected, nvme, least)


def test_second_block_is_refused_while_the_first_uses_snapshots(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap.snapshots.folders._TURN_SECONDS", 0.0)
    with _block(nvme, WHOLE) as first, _block(nvme, WHOLE, seed=1) as second:
        first.snapshot("a")
        assert [one.name for one in second.snapshots()] == ["a"]
        for call in (second.snapshot, second.restore, second.drop_snapshot):
            with pytest.raises(BlockingIOError, match="another offload block"):
                call("a")


def test_snapshot_stays_when_blocks_begin_and_swap_files_are_collected(
    least: int, nvme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        taken = offloaded.snapshot("a")
        expected = everything(offloaded)
        train(offloaded, 2, 4)
    with _block(nvme, least, seed=6):
        pass
    assert cli.main(["gc", os.fspath(nvme)]) == 0
    capsys.readouterr()
    kept = sum(path.lstat().st_blocks * 512 for path in nvme.rglob("*") if path.is_file())
    assert kept < taken.nbytes + 64 * 1024
    _assert_restored_anew("a", expected, nvme, least)


def test_snapshot_is_dropped_by_the_command_and_its_space_comes_back(
    least: int, nvme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _block(nvme, least) as offloaded:
        expected = _trained_past(offloaded, 1, 2)
        taken = offloaded.snapshot("b")
    assert cli.main(["snapshots", os.fspath(nvme), "--drop", "b"]) == 0
    assert capsys.readouterr().out.startswith("a: step 1, ")
    kept = sum(path.lstat().st_blocks * 512 for path in nvme.rglob("*") if path.is_file())
    assert kept < taken.nbytes + 64 * 1024
    _assert_restored_anew("a", expected, nvme, least)
    assert cli.main(["snapshots", os.fspath(nvme), "--drop", "b"]) == 1
    assert "there is no snapshot b" in capsys.readouterr().err
    assert cli.main(["snapshots", os.fspath(nvme), "--drop", "a"]) == 0
    assert list(nvme.iterdir()) == []


def test_file_that_is_missing_or_too_short_is_named_and_nothing_is_changed(
    least: int, nvme: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("a")
    (swap_file,) = nvme.rglob("*.swap")
    with _block(nvme, least, seed=2) as offloaded:
        before = everything(offloaded)
        os.truncate(swap_file, 4096)
        with pytest.raises(AioError, match="the file is damaged"):
            offloaded.restore("a")
        swap_file.unlink()
        with pytest.raises(AioError, match="in none of the nvme directories"):
            offloaded.restore("a")
        assert_same(before, everything(offloaded))


def test_damaged_snapshot_is_refused_and_keeps_what_others_need(
    least: int, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _block(nvme, least) as offloaded:
        expected = _trained_past(offloaded, 2, 3)
        offloaded.snapshot("b")
    manifest = next(path for path in nvme.rglob("manifest.json") if path.parent.name == "b")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])
    with _block(nvme, least, seed=2) as offloaded:
        assert [one.name for one in offloaded.snapshots()] == ["a"]
        with pytest.raises(ValueError, match="b"):
            offloaded.restore("b")
        with pytest.raises(ValueError, match="drop_snapshot"):
            offloaded.snapshot("b")
        assert_restored(offloaded, expected)
    assert "drop_snapshot('b')" in caplog.text
    with _block(nvme, least, seed=2) as offloaded:
        offloaded.drop_snapshot("b")
        assert_restored(offloaded, expected)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "-a", "a b", "a\n", "ä", "a" * 101, ".a"]
)
def test_name_that_is_none_is_refused(name: str, nvme: Path) -> None:
    with _block(nvme, WHOLE) as offloaded:
        for call in (offloaded.snapshot, offloaded.restore, offloaded.drop_snapshot):
            with pytest.raises(ValueError, match="is no name of a snapshot"):
                call(name)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_number_to_keep_that_is_none_is_refused(keep: Any, nvme: Path) -> None:
    with _block(nvme, WHOLE) as offloaded, pytest.raises((TypeError, ValueError), match="keep"):
        offloaded.snapshot("a", keep)


def test_forked_child_is_refused_and_takes_no_lock_along(least: int, nvme: Path) -> None:
    with _block(nvme, least) as offloaded:
        offloaded.snapshot("a")
        child = os.fork()
        if child == 0:
            os._exit(_what_a_child_may(offloaded))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        offloaded.restore("a")
    with _block(nvme, least) as offloaded:
        offloaded.restore("a")


def _what_a_child_may(offloaded: infinity.OffloadedModel) -> int:
    for call in (offloaded.snapshot, offloaded.restore, offloaded.drop_snapshot):
        try:
            call("a")
        except RuntimeError as error:
            if "cannot be used in process" in str(error):
                continue
        return 1
    return 0


def test_interrupted_calls_leave_whole_snapshots(least: int, nvme: Path) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("kept")
        expected = everything(offloaded)
        train(offloaded, 2, 3)
        calls = {
            "snapshot": lambda: offloaded.snapshot("a", keep=2),
            "restore": lambda: offloaded.restore("kept"),
            "drop": lambda: offloaded.drop_snapshot("a"),
        }
        for name, call in calls.items():
            lines = interrupt(call, None)
            for number in sampled(lines.seen, 4, seed=len(name)):
                if name == "drop":
                    offloaded.snapshot("a")
                interrupt(call, number)
                assert {one.name for one in offloaded.snapshots()} <= {"a", "kept"}
                assert_restored(offloaded, expected, "kept")
                train(offloaded, 2, 3)
    _assert_restored_anew("kept", expected, nvme, least)


@pytest.mark.parametrize("left", [(), ("points",), ("lock",), ("lock", "points")])
def test_folder_that_a_killed_process_had_begun_to_make_goes_with_the_next_block(
    left: tuple[str, ...], nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = nvme / ".infinity" / f"snapshots-{os.geteuid()}" / "0123456789ab"
    folder.mkdir(parents=True)
    if "points" in left:
        (folder / "points").mkdir()
    if "lock" in left:
        (folder / "lock").touch()
    with _block(nvme, WHOLE):
        assert not folder.exists()
    assert list(nvme.iterdir()) == []
    assert caplog.records == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_snapshot_that_could_not_be_read_once_is_restored_and_replaced_as_any_other(
    is_replaced: bool, least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a", extra=1)
        expected = everything(offloaded)
    failures, read = [OSError(errno.EIO, "once", str(nvme))], read_entry

    def read_or_fail(folder: Path) -> Any:
        if failures:
            raise failures.pop()
        return read(folder)

    with _block(nvme, least) as offloaded:
        train(offloaded, 4, 5)
        monkeypatch.setattr(known, "read_entry", read_or_fail)
        if is_replaced:
            offloaded.snapshot("a", extra=2)
            assert offloaded.restore("a") == 2
        else:
            assert_restored(offloaded, expected, extra=1)
        assert failures == []
