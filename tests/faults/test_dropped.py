"""Objects that nobody closed and that go at any line, on any thread, with any lock held, as
Python's collector may have it: nothing waits, and what they held is found."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import checkpoint
import infinity
from aio import Engine
from checkpoint.dcp import StorageWriter
from swap.interruptions.undo import Closing, close_gone
from swap.storage.drives.directory import SwapDirectory, reclaim
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning"),
]


def at_line(action: Callable[[], object], file: str, number: int, then: Callable[[], None]) -> int:
    """Lines of ``file`` that ``action`` goes through on all threads; ``then`` is called where one
    is about to begin the line of this number.
    """
    seen = 0

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen - 1 == number:
                then()
        return within

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return within if frame.f_code.co_filename.endswith(file) else None

    threading.settrace(called)
    sys.settrace(called)
    try:
        action()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return seen


class FailsLate(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise OSError("of another rank")


def given_up(path: Path) -> StorageWriter:
    """The writer of a save that DCP gave up without a word to it."""
    writer = StorageWriter(path)
    plan = FailsLate()
    plan.set_up_planner({"x": torch.ones(9)}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([writer.prepare_local_plan(plan.create_local_plan())])
    return writer


def test_writer_that_goes_at_any_line_of_a_lock_holds_up_no_save(tmp_path: Path) -> None:
    def save() -> None:
        checkpoint.save({"x": torch.ones(9)}, tmp_path / "other")

    save()
    total = at_line(save, "directory/lock.py", -1, lambda: None)
    assert total > 10
    for number in range(total):
        writers = [given_up(tmp_path / "given up")]
        at_line(save, "directory/lock.py", number, writers.clear)
        assert writers == []
        checkpoint.save({"x": torch.zeros(9)}, tmp_path / "given up")


def test_swap_directory_that_goes_at_any_line_of_another_holds_up_none(tmp_path: Path) -> None:
    with Engine("posix") as engine:

        def use() -> None:
            SwapDirectory(tmp_path, engine).close()

        total = at_line(use, "storage/drives/directory.py", -1, lambda: None)
        assert total > 40
        for number in range(0, total, 3):
            dropped = [SwapDirectory(tmp_path, engine)]
            at_line(use, "storage/drives/directory.py", number, dropped.clear)
            assert dropped == []
    reclaim(tmp_path)
    assert list(tmp_path.glob(".infinity/*")) == []


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """The collector runs at every allocation that it may run at."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def in_a_cycle(thing: object) -> None:
    cycle: list[object] = [thing]
    cycle.append(cycle)


def test_things_dropped_unclosed_while_all_is_collected_harm_no_save_and_no_training(
    tmp_path: Path,
) -> None:
    least = least_budget(lambda: seeded(Stack), tmp_path)
    weight = torch.nn.Parameter(torch.ones(1 << 18))
    model = seeded(Stack)
    own: dict[str, Any] = {"nvme": tmp_path, "host_memory": 32 << 20}
    with warnings.catch_warnings(), infinity.offload(model, tmp_path, host_memory=least) as run:
        warnings.simplefilter("ignore", ResourceWarning)
        vector_loss(model, 0).backward()
        with collecting(), Engine("posix") as engine:
            for thing in (
                lambda: given_up(tmp_path / "given up"),
                lambda: SwapDirectory(tmp_path, engine),
                lambda: infinity.OffloadedAdamW([weight], **own),
                lambda: checkpoint.open_stream(tmp_path / "stream", "wb"),
            ):
                in_a_cycle(thing())
                checkpoint.save({"x": weight}, tmp_path / "save")
                assert torch.equal(checkpoint.load(tmp_path / "save")["x"], weight)
        run.step()
    gc.collect()
    reclaim(tmp_path)
    assert list(tmp_path.glob(".infinity/*")) == []


def test_closing_runs_on_another_thread_when_the_owner_is_gone() -> None:
    class Owner:
        pass

    threads: list[threading.Thread] = []
    owner = Owner()
    closing = Closing(owner, lambda: threads.append(threading.current_thread()))
    lock = closing._turn
    with lock:  # as anybody may hold any
        del owner
        gc.collect()
        assert threads == []
    close_gone()
    assert len(threads) == 1
    closing.now()
    assert len(threads) == 1


def test_closing_that_fails_is_done_again_and_a_done_one_is_not() -> None:
    calls: list[int] = []

    def close() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("not yet")

    closing = Closing(close, close)
    with pytest.raises(OSError, match="not yet"):
        closing.now()
    closing.now()
    closing.now()
    assert len(calls) == 2
