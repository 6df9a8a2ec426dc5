"""Threads that the system gives and that end before their first step, as memory has; and handlers
of signals that come while one starts.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from aio import Engine
from aio.process import threads
from aio.process.threads import (
    Latch,
    Thread,
    WatchedThread,
    begun,
    join_thread,
    start_apart,
    start_thread,
    surely,
)
from checkpoint.sheltered import Worker, sheltered
from checkpoint.threads import Workers, run_all, started
from swap.gradients.inbox import GradientInbox
from swap.interruptions.apart import run_apart
from swap.interruptions.undo import Undo
from swap.update.pipeline import UpdatePipeline


def dies(*_: object) -> None:
    raise MemoryError


@pytest.fixture(params=["launcher", "thread", "run"])
def no_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has the thread that launches, the one that is launched, or its work end at once."""

    def start_dying(*_: object) -> int:
        return _thread.start_new_thread(_thread.exit, ())

    monkeypatch.setattr("aio.process.threads.LOOK_SECONDS", 0.01)
    where: str = request.param
    if where == "launcher":
        launches = SimpleNamespace(**{**vars(_thread), "start_new_thread": start_dying})
        monkeypatch.setattr("aio.process.threads._thread", launches)
    elif where == "thread":
        monkeypatch.setattr(threading, "_start_new_thread", start_dying)
    else:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(WatchedThread, "run", dies)
    return where


def start_worker() -> None:
    Worker(lambda _: None, "a-thread").start()


def start_own() -> None:
    thread = Thread(lambda: None, "a-thread")
    try:
        start_thread(thread)
    finally:
        join_thread(thread)


@pytest.mark.parametrize(
    "start",
    [
        start_worker,
        start_own,
        lambda: sheltered(lambda _: None, "a-thread"),
        lambda: start_apart(WatchedThread(lambda: None, "a-thread")),
    ],
    ids=["worker", "own", "sheltered", "apart"],
)
def test_a_thread_that_ends_before_it_begins_is_an_error_that_names_it(
    no_memory: str, start: Callable[[], Any]
) -> None:
    with pytest.raises(MemoryError, match="the thread a-thread had no memory to begin with"):
        start()
    assert "a-thread" not in [thread.name for thread in threading.enumerate()]


def use_workers() -> None:
    with Workers(2, "a-thread") as workers:
        workers.submit(lambda: None).result()


@pytest.mark.timeout(60)
def test_the_end_of_work_is_told_when_there_is_memory_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waited for it waited for ever."""
    setting, failed, done = Latch.set, list[str](), list[int]()

    def set_later(latch: Latch) -> None:
        name = threading.current_thread().name
        if name.startswith("a-thread") and len(failed) < 5:
            failed.append(name)
            raise MemoryError
        setting(latch)

    def work() -> int:
        done.append(1)
        failed.clear()
        return 3

    def fail() -> None:
        raise ValueError("of the work")

    monkeypatch.setattr(Latch, "set", set_later)
    with Workers(1, "a-thread") as workers:
        assert workers.submit(work).result() == 3
        assert (len(failed), done) == (5, [1])
        with pytest.raises(ValueError, match="of the work"):
            workers.submit(fail).result()


@pytest.mark.parametrize("no_memory", ["thread", "run"], indirect=True)
@pytest.mark.parametrize(
    "start",
    [
        lambda: started(begun, "a-thread"),
        lambda: run_all([lambda: 1, lambda: 2], lambda: None, "a-thread"),
        use_workers,
    ],
    ids=["started", "run_all", "workers"],
)
def test_work_whose_thread_ends_before_it_begins_is_an_error_that_names_it(
    no_memory: str, start: Callable[[], Any]
) -> None:
    with pytest.raises(MemoryError, match=r"the thread a-thread.* had no memory to begin with"):
        start()


NOTHING: Any = None


@pytest.mark.parametrize(
    "start",
    [
        lambda: Engine("posix"),
        start_worker,
        lambda: sheltered(lambda _: None, "a-thread"),
        lambda: started(begun, "a-thread"),
        lambda: run_all([lambda: 1, lambda: 2], lambda: None, "a-thread"),
        use_workers,
        lambda: run_apart(lambda: None, "a-thread"),
        lambda: UpdatePipeline(NOTHING, NOTHING, Undo()),
        lambda: GradientInbox(NOTHING, NOTHING, NOTHING, NOTHING, Undo()),
    ],
    ids=[
        "engine",
        "worker",
        "sheltered",
        "started",
        "run_all",
        "workers",
        "apart",
        "pipeline",
        "inbox",
    ],
)
def test_a_thread_that_ends_between_its_start_and_its_work_is_an_error(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aio.process.threads.LOOK_SECONDS", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(threading.Thread, "run", dies)
    with pytest.raises(MemoryError, match=r"the thread .* had no memory to begin with"):
        start()


def test_work_apart_that_had_no_memory_to_be_done_with_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("swap.interruptions.apart.stay_in_background", dies)
    with pytest.raises(MemoryError):
        run_apart(lambda: None, "a-thread")


@pytest.mark.parametrize("keeps", ["checkpoint.sheltered", "swap.interruptions.apart"])
def test_error_of_work_comes_out_where_no_memory_is_left_to_let_go_of_it(
    keeps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of the work")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(f"{keeps}.let_go", dies)
    run = sheltered if keeps.startswith("checkpoint") else run_apart
    with pytest.raises(ValueError, match="of the work"):
        run(fail, "a-thread")


def test_turns_are_taken_again_where_there_was_no_memory() -> None:
    outcomes: list[Any] = [MemoryError(), True, SystemError(), MemoryError(), True, False]
    thread: Thread

    def turn() -> bool:
        assert thread.has_begun.is_set()
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    thread = Thread(lambda: thread.take_turns(turn), "a-thread", tells=True)
    start_thread(thread)
    join_thread(thread)
    assert outcomes == []


def test_turns_end_with_what_comes_at_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aio.process.threads._wait_for_memory", lambda: None)

    def turn() -> bool:
        raise ValueError("of the turn")

    with pytest.raises(ValueError, match="of the turn"):
        Thread(lambda: None, "a-thread").take_turns(turn)


def test_what_has_to_be_done_is_done_again_until_there_is_memory() -> None:
    outcomes: list[Any] = [MemoryError(), MemoryError(), None]

    def action() -> str:
        if outcome := outcomes.pop(0):
            raise outcome
        return "done"

    assert surely(action) == "done"


def test_a_watched_thread_that_ran_has_died_and_one_that_runs_has_not() -> None:
    ends = threading.Event()
    thread = WatchedThread(ends.wait, "a-thread")
    assert not thread.has_died()
    thread.start()
    assert not thread.has_died()
    ends.set()
    thread.join()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "start",
    [
        start_worker,
        start_own,
        lambda: sheltered(lambda _: None, "a-thread"),
        lambda: started(begun, "a-thread"),
        lambda: run_all([lambda: 1, lambda: 2], lambda: None, "a-thread"),
        lambda: run_apart(lambda: None, "a-thread"),
    ],
    ids=["worker", "own", "sheltered", "started", "run_all", "apart"],
)
def test_what_a_handler_raises_while_a_thread_starts_comes_out_as_it_is(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = RuntimeError("of the handler")

    def handle(number: int, frame: FrameType | None) -> None:
        raise raised

    left = [True]

    def wait_while(*args: Any) -> None:
        if left and threading.current_thread() is threading.main_thread():
            left.clear()
            signal.raise_signal(signal.SIGUSR1)
        waiting(*args)

    waiting = threads.wait_while
    monkeypatch.setattr(threads, "wait_while", wait_while)
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(RuntimeError) as caught:
            start()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert caught.value is raised
