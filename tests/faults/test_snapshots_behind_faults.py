"""Snapshots behind training when something goes wrong: training and earlier ones are whole, nothing
stays pinned, and the error is told once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import infinity
from aio import AioError
from checkpoint.saving.data_files import RankFiles
from checkpoint.saving.generation import Generation
from checkpoint.saving.pending import PendingSave
from infinity import background
from infinity.model import training_of
from infinity.snapshots import points, saving
from infinity.snapshots.reading import SavedPoint
from tests.support.interrupts import interrupt, interrupt_at_call, sampled
from tests.support.snapshot_runs import (
    ADAMW,
    assert_restored,
    assert_same,
    block_of,
    everything,
    left_empty,
    no_room,
    shallow,
    train,
)
from tests.support.training import least_budget

_block = partial(block_of, shallow)


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(shallow, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Nothing may stay here but what a test leaves on purpose."""
    with left_empty(tmp_path / "nvme", shallow) as directory:
        yield directory


PLACES: dict[str, tuple[Any, str]] = {
    "space": (RankFiles, "check_space"),
    "write": (RankFiles, "write"),
    "link": (os, "link"),
    "files": (points, "keep_files"),
    "publish": (Generation, "publish"),
}


@pytest.mark.parametrize("place", PLACES)
def test_snapshot_that_fails_behind_training_leaves_all_as_it_was(
    place: str, least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        if place != "link":
            offloaded.snapshot("a", extra=1)
        first = everything(offloaded)
        train(offloaded, 1, 3)
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[place], no_room)
            pending = offloaded.snapshot("a", keep=1, block=False)
            train(offloaded, 3, 4)
            with pytest.raises(OSError, match="no room"):
                pending.result()
        assert pending.done()
        assert pending.staged()
        state = training_of(offloaded).state
        assert state.extents is not None
        before = everything(offloaded)
        if place == "link":
            assert offloaded.snapshots() == []
        else:
            assert [one.step for one in offloaded.snapshots()] == [1]
            assert_restored(offloaded, first, extra=1)
            offloaded.drop_snapshot("a")
        used = state.placement.state_nvme_bytes + state.placement.gradient_nvme_bytes
        assert state.extents.used_bytes == used
        offloaded.snapshot("a", block=False)
        train(offloaded, 4, 5)
        offloaded.restore("a")
        assert_same(before if place == "link" else first, everything(offloaded))


def _publish_and_fail(self: Generation, raw: bytes, publish: Any = Generation.publish) -> None:
    publish(self, raw)
    raise OSError(errno.EIO, "the directory cannot be synced")


def test_snapshot_behind_training_whose_last_sync_fails_is_there_and_whole(
    least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a", extra=1)
        train(offloaded, 1, 2)
        expected = everything(offloaded)
        with monkeypatch.context() as patch:
            patch.setattr(Generation, "publish", _publish_and_fail)
            pending = offloaded.snapshot("a", extra=2, block=False)
            with pytest.raises(OSError, match="cannot be synced"):
                pending.result()
        train(offloaded, 2, 6)
        assert_restored(offloaded, expected, extra=2)
    with _block(nvme, least, seed=2) as offloaded:
        assert_restored(offloaded, expected, extra=2)


@pytest.mark.parametrize("call", ["snapshot", "behind", "restore", "drop", "save", "end", "other"])
def test_error_that_nobody_asked_for_is_raised_once(
    call: str,
    least: int,
    nvme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def block() -> None:
        with _block(nvme, least) as offloaded:
            offloaded.snapshot("a", extra=1)
            with monkeypatch.context() as patch:
                patch.setattr(RankFiles, "write", no_room)
                offloaded.snapshot("a", block=False).wait_done()
            calls: dict[str, Callable[[], object]] = {
                "snapshot": lambda: offloaded.snapshot("a", extra=2),
                "behind": lambda: offloaded.snapshot("a", extra=2, block=False),
                "restore": lambda: offloaded.restore("a"),
                "drop": lambda: offloaded.drop_snapshot("a"),
                "save": lambda: offloaded.save(tmp_path / "saved", snapshot="a"),
            }
            if call in calls:
                with pytest.raises(AioError, match="no room"):
                    calls[call]()
                assert offloaded.restore("a") == 1
                calls[call]()
            elif call == "other":
                offloaded.snapshot("b")
                assert offloaded.restore("a") == 1

    if call in ("end", "other"):
        with pytest.raises(AioError, match="no room"):
            block()
    else:
        block()
    assert ("nobody asked for its result" in caplog.text) == (call == "other")


def test_what_keeps_a_snapshot_from_beginning_is_raised_by_the_call(
    least: int, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        state = training_of(offloaded).state
        assert state.extents is not None
        offloaded.flush()
        used = state.extents.used_bytes
        with pytest.raises(TypeError, match="extra"):
            offloaded.snapshot("a", extra=threading.current_thread().ident.__class__, block=False)
        train(offloaded, 1, 2)
        offloaded.flush()
        assert state.extents.used_bytes == used
        assert offloaded.snapshots() == []
    assert caplog.records == []


def test_call_of_a_signal_handler_while_a_snapshot_is_on_its_way_ends(
    least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a call that waits for it, it is refused, and leaves that as it is; behind the
    call it is carried out.
    """
    wait_done = PendingSave.wait_done
    outcomes: list[str] = []
    with _block(nvme, least) as offloaded:

        def handler() -> None:
            monkeypatch.setattr(PendingSave, "wait_done", wait_done)
            try:
                outcomes.append(offloaded.snapshot("b", block=False).result().name)
            except RuntimeError as error:
                outcomes.append(str(error))

        def interrupted(self: PendingSave, *arguments: Any) -> bool:
            handler()
            return wait_done(self, *arguments)

        pending = offloaded.snapshot("a", block=False)
        monkeypatch.setattr(PendingSave, "wait_done", interrupted)
        assert pending.result().name == "a"
        offloaded.snapshot("b", block=False)
        monkeypatch.setattr(PendingSave, "wait_done", interrupted)
        offloaded.restore("a")  # waits for all saves before it begins
        monkeypatch.setattr(points.Snapshots, "_let_end", lambda *_: handler())
        offloaded.snapshot("c")
        monkeypatch.undo()
        offloaded.snapshot("d", block=False)
        handler()
        assert {one.name for one in offloaded.snapshots()} == {"a", "b", "c", "d"}
    assert len(outcomes) == 4
    assert all("Set a flag there" in outcome for outcome in outcomes[:3])
    assert outcomes[3] == "b"


@pytest.mark.proof
def test_interrupted_calls_leave_whole_snapshots_behind_training(least: int, nvme: Path) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("kept", block=False)
        expected = everything(offloaded)
        train(offloaded, 2, 3)

        def call() -> None:
            offloaded.snapshot("a", keep=2, block=False)
            train(offloaded, 3, 4)
            offloaded.snapshot("a", keep=2, block=False).result()

        lines = interrupt(call, None)
        for number in sampled(lines.seen, 6, seed=2):
            interrupt(call, number)
            assert_restored(offloaded, expected, "kept")
            assert {one.name for one in offloaded.snapshots()} <= {"a", "kept"}
            train(offloaded, 2, 3)
        state = training_of(offloaded).state
        for one in offloaded.snapshots():
            offloaded.drop_snapshot(one.name)
        assert state.extents is not None
        offloaded.flush()
        used = state.placement.state_nvme_bytes + state.placement.gradient_nvme_bytes
        assert state.extents.used_bytes == used


def test_save_of_a_snapshot_that_goes_on_behind_an_interrupt_is_waited_for(
    least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would read what steps write where the snapshot was, or find its files closed."""
    fill = SavedPoint.fill

    def fill_later(self: SavedPoint, *arguments: Any) -> None:
        time.sleep(0.001)
        fill(self, *arguments)

    monkeypatch.setattr(SavedPoint, "fill", fill_later)
    own = tuple(str(module.__file__) for module in (points, saving, background))
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        expected = everything(offloaded)

        def call(path: Path) -> None:
            offloaded.save(path, block=False, snapshot="a")

        offloaded.snapshot("a")
        seen = interrupt_at_call(partial(call, tmp_path / "whole"), None, own).seen
        for number in range(seen):
            interrupt_at_call(partial(call, tmp_path / f"{number}"), number, own)
            offloaded.drop_snapshot("a")
            assert "checkpoint-save" not in [thread.name for thread in threading.enumerate()]
            offloaded.snapshot("a")
        offloaded.drop_snapshot("a")
        for path in (p for p in tmp_path.iterdir() if (p / "manifest.json").exists()):
            offloaded.load(path)
            assert_same(expected, everything(offloaded))


def test_forked_child_does_not_wait_for_the_snapshot_of_its_parent(
    least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, keep_files = threading.Event(), vars(points)["keep_files"]

    def keep_later(*arguments: Any) -> None:
        assert opened.wait(60)
        keep_files(*arguments)

    monkeypatch.setattr(points, "keep_files", keep_later)
    with _block(nvme, least) as offloaded:
        pending = offloaded.snapshot("a", block=False)
        child = os.fork()
        if child == 0:
            os._exit(_what_a_child_may(pending))
        opened.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pending.result().name == "a"


def _what_a_child_may(pending: infinity.PendingSnapshot) -> int:
    assert not pending.done()
    assert pending.staged()
    try:
        pending.result()
    except RuntimeError as error:
        return 0 if "runs in process" in str(error) else 1
    return 1


def test_older_one_that_cannot_be_dropped_is_a_warning(
    least: int, nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Path) -> None:
        raise OSError(errno.EIO, "cannot be removed")

    with _block(nvme, least) as offloaded:
        offloaded.snapshot("a")
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr("infinity.snapshots.known.remove_point", fails)
            pending = offloaded.snapshot("b", keep=1, block=False)
            assert pending.result().name == "b"
        assert "cannot drop the snapshot a" in caplog.text
        assert {one.name for one in offloaded.snapshots()} == {"a", "b"}
        offloaded.snapshot("c", keep=1, block=False).result()
        assert [one.name for one in offloaded.snapshots()] == ["c"]
