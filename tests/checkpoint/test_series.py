"""The order of saves beside each other, whatever saves them and whatever the clocks say."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aio
import checkpoint
import infinity
from checkpoint import series
from checkpoint.dcp import StorageWriter
from checkpoint.directory.locate import peek_saved
from tests.checkpoint.test_manager import state
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

HOUR = 3600 * 10**9
real_time = time.time_ns

Save = Callable[[Path, int], None]


def save_now(path: Path, step: int) -> None:
    checkpoint.save(state(step), path)


def save_behind(path: Path, step: int) -> None:
    checkpoint.save_async(state(step), path).result()


def save_by_dcp(path: Path, step: int) -> None:
    writer = StorageWriter(path)
    dcp.save({"w": torch.ones(4) * step}, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]


DOORS: list[Save] = [save_now, save_behind, save_by_dcp]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock so many nanoseconds ahead."""

    def set_to(ahead: int) -> None:
        monkeypatch.setattr("time.time_ns", lambda: real_time() + ahead)

    return set_to


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", DOORS)
def test_a_save_to_a_step_after_the_clock_is_set_back_is_the_latest_and_stays(
    tmp_path: Path, set_clock: Callable[[int], None], save: Save
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        set_clock(0 if step < 3 else -HOUR)
        save(manager.path(step), step)
        manager.retire()
        assert manager.latest() == step
    assert manager.steps() == [4, 5]


@pytest.mark.parametrize("block", [True, False])
def test_an_offloaded_save_to_a_step_after_the_clock_is_set_back_stays(
    tmp_path: Path, set_clock: Callable[[int], None], block: bool
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    model = torch.nn.Linear(8, 8)
    (tmp_path / "nvme").mkdir()
    with infinity.offload(
        model, tmp_path / "nvme", optimizer=infinity.AdamW(lr=1e-3), host_memory="64MiB"
    ) as offloaded:
        for step in (1, 2):
            set_clock(0 if step < 2 else -HOUR)
            saved = offloaded.save(manager.path(step), block=block)
            if isinstance(saved, checkpoint.PendingSave):
                saved.result()
            manager.retire()
    assert manager.steps() == [2]


def test_saves_beside_a_step_of_a_host_whose_clock_is_ahead_are_later_and_it_is_told(
    tmp_path: Path, set_clock: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_clock(HOUR)
    checkpoint.save(state(5), tmp_path / "there" / "step-5")
    set_clock(0)
    shutil.copytree(tmp_path / "there", tmp_path / "run")
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    for step in (6, 7):
        checkpoint.save(state(step), manager.path(step))
        manager.retire()
        assert manager.steps() == [step]
    (said,) = [r.getMessage() for r in caplog.records if "the clock says now" in r.getMessage()]
    assert "step-5" in said


def test_a_save_that_still_runs_is_earlier_than_the_next_one(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = checkpoint.save_async(model.state_dict(), tmp_path / "step-1", guard=optimizer)
    set_clock(-HOUR)
    checkpoint.save(state(2), tmp_path / "step-2")
    first.result()
    assert checkpoint.Manager(tmp_path).latest() == 2


def save_by_dcp_to_an_id(path: Path, step: int) -> None:
    writer = StorageWriter(path.with_name("another"))
    dcp.save(state(step), checkpoint_id=path, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [*DOORS, save_by_dcp_to_an_id])
def test_a_save_through_a_link_or_a_relative_path_is_later_than_the_steps_there(
    tmp_path: Path, set_clock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    checkpoint.save(state(1), tmp_path / "run" / "step-1")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "step-4").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "run")
    set_clock(-HOUR)
    for step, path in ((2, tmp_path / "link" / "step-2"), (3, Path("step-3")), (4, Path("step-4"))):
        save(path, step)
        assert checkpoint.Manager(tmp_path / "run").latest() == step


def test_a_save_elsewhere_has_the_time_of_the_clock(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    checkpoint.save(state(1), tmp_path / "step-1")
    set_clock(-HOUR)
    checkpoint.save(state(2), tmp_path / "best")
    saved = peek_saved(tmp_path / "best")
    assert saved is not None
    assert saved < real_time() - HOUR // 2


def test_the_step_saved_here_last_stays_where_one_from_ahead_is_copied_in_after_it(
    tmp_path: Path, set_clock: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_clock(HOUR)
    checkpoint.save(state(5), tmp_path / "there" / "step-5")
    set_clock(0)
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    manager.save(6, state(6))
    shutil.copytree(tmp_path / "there" / "step-5", manager.path(5))
    manager.retire()
    assert manager.steps() == [5, 6]
    assert [r for r in caplog.records if f"{manager.path(6)} stays" in r.getMessage()]
    manager.save(7, state(7))
    assert manager.steps() == [7]


def test_what_was_saved_under_another_name_and_renamed_to_a_step_stays(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        set_clock(-step * HOUR)
        checkpoint.save(state(step), tmp_path / "new")
        (tmp_path / "new").rename(manager.path(step))
        manager.retire()
    assert manager.load(3)["step"] == 3


def test_what_came_last_stays_where_another_process_saved_it_by_a_clock_behind(
    tmp_path: Path,
    set_clock: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    for step in (1, 2, 3):
        set_clock(-step * HOUR)
        checkpoint.save(state(step), tmp_path / "new")
        (tmp_path / "new").rename(manager.path(step))
    monkeypatch.setattr("checkpoint.series._given", [])
    for step in (3, 1, 2):  # the file system notes when
        os.utime(manager.path(step) / "manifest.json")
        time_of = (manager.path(step) / "manifest.json").stat().st_ctime_ns
        while step != 2 and time_of == _touched(tmp_path / "probe"):
            pass
    manager.retire()
    assert manager.steps() == [1, 2], "1 is the last by its time, 2 came last"
    assert [r for r in caplog.records if f"{manager.path(2)} stays" in r.getMessage()]


def test_a_step_saved_here_once_goes_when_others_have_saved_later_ones(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    manager.save(0, state(0))
    for step in (1, 2, 3):
        _save_elsewhere(manager.path(step), step)
        manager.retire()
    assert manager.steps() == [2, 3]


def test_what_another_process_saved_last_stays_where_one_from_ahead_is_copied_in(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    set_clock(HOUR)
    _save_elsewhere(tmp_path / "there" / "step-1", 1)
    set_clock(0)
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    manager.save(0, state(0))
    _save_elsewhere(manager.path(5), 5)
    shutil.copytree(tmp_path / "there" / "step-1", manager.path(1))
    manager.retire()
    assert manager.steps() == [1, 5]


def _save_elsewhere(path: Path, step: int) -> None:
    """As another process does, of whose saves this one knows nothing."""
    checkpoint.save(state(step), path)
    series._given.pop()


def _touched(path: Path) -> int:
    path.write_text("")
    return path.stat().st_ctime_ns


def test_steps_that_keep_every_keeps_stay_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    manager = checkpoint.Manager(tmp_path, keep=1, keep_every=10)
    for step in (10, 11, 20, 21):
        checkpoint.save(state(step), manager.path(step))
        manager.retire()
    assert manager.steps() == [10, 20, 21]
    assert not caplog.records


def test_a_time_ahead_of_the_clock_is_told_of_by_who_looks_for_the_latest(
    tmp_path: Path, set_clock: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_clock(HOUR)
    checkpoint.save(state(5), tmp_path / "step-5")
    set_clock(0)
    assert checkpoint.Manager(tmp_path).load()["step"] == 5
    (said,) = [r.getMessage() for r in caplog.records if "the clock says now" in r.getMessage()]
    assert "step-5" in said


@pytest.mark.parametrize("keep_every", [None, 50])
def test_a_step_stays_as_long_as_a_copy_of_it_that_is_kept_reads_its_data(
    tmp_path: Path, stripes: list[Path], keep_every: int | None
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=2, keep_every=keep_every)
    for step in (7, 8):
        manager.save(step, state(step))
    shutil.copytree(manager.path(8), manager.path(50))
    manager.save(51, state(51))
    assert manager.steps() == [8, 50, 51], "a copy takes nobody's place"
    for step in (52, 53):
        manager.save(step, state(step))
    assert manager.steps() == ([8, 50] if keep_every else []) + [52, 53]


def test_a_step_stays_where_a_copy_of_it_stays_as_what_came_last(
    tmp_path: Path, stripes: list[Path]
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=2)
    for step in (7, 8, 9):
        checkpoint.save(state(step), manager.path(step), stripes)
    shutil.copytree(manager.path(7), manager.path(50))
    manager.retire()
    assert manager.steps() == [7, 8, 9, 50]
    manager.save(10, state(10))
    assert manager.steps() == [9, 10]
    assert not list(tmp_path.glob("run/step-50")) + list(tmp_path.glob("run/step-7"))


def test_copies_of_links_are_removed_with_the_step_that_they_lead_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(5, state(5))
    for copy in (4, 50):
        shutil.copytree(manager.path(5), manager.path(copy), copy_function=_linked)
    manager.save(6, state(6))
    assert [path.name for path in tmp_path.iterdir()] == ["step-6"]
    assert not caplog.records


def test_a_step_stays_as_long_as_another_one_is_a_link_to_it(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(5, state(5))
    manager.path(50).symlink_to("step-5")
    for step in (6, 7):
        manager.save(step, state(step))
    assert manager.steps() == [5, 7, 50]
    assert manager.load(50)["step"] == 5
    manager.path(50).unlink()
    manager.save(8, state(8))
    assert manager.steps() == [8]


@pytest.mark.parametrize("copy", [4, 50])
def test_a_copy_goes_before_the_step_whose_data_it_reads(
    tmp_path: Path, stripes: list[Path], copy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it stayed as damage, where the removal ends between the two, or cannot remove the copy."""
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=1)
    manager.save(8, state(8))
    shutil.copytree(manager.path(8), manager.path(copy))
    removed: list[Path] = []

    def failing(path: Path, *given: Any) -> bool:
        removed.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.known.retiring.remove_checkpoint", failing)
        manager.save(9, state(9))
    assert removed == [manager.path(copy)]
    assert manager.steps() == sorted([8, 9, copy])
    manager.save(10, state(10))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-10"]
    assert all(len(list(stripe.iterdir())) == 1 for stripe in stripes)


@pytest.mark.parametrize("copy", ["copy", "link", "damaged"])
def test_a_step_stays_where_what_reads_its_data_cannot_be_read_for_a_moment(
    tmp_path: Path, stripes: list[Path], copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.Manager(tmp_path / "run", stripes)
    saved.save(8, state(8))
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=1, keep_every=50)
    manifest = manager.path(50) / "manifest.json"
    if copy == "link":
        manager.path(50).symlink_to("step-8")
    else:
        shutil.copytree(manager.path(8), manager.path(50))
    (tmp_path / "run" / "step-77").symlink_to("step-77")
    whole = manifest.read_bytes()
    if copy == "damaged":
        manifest.write_bytes(b"{" + whole)
    opened = aio.open_regular_file

    def failing(path: Path, *, follow: bool = True) -> Any:
        if path == manifest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, follow=follow)

    with monkeypatch.context() as patch:
        if copy != "damaged":
            patch.setattr("aio.open_regular_file", failing)
        manager.save(9, state(9))
    if copy == "damaged":
        manifest.write_bytes(whole)
    assert manager.load(50)["step"] == 8
    assert manager.steps() == [8, 9, 50]


def _linked(source: str, to: str) -> None:
    """As `cp -rs` does."""
    Path(to).symlink_to(source)
