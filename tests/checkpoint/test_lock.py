"""The lock on a directory beside forks, handlers of signals and disks that hang."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import checkpoint
from aio.process.descriptors import Descriptor
from checkpoint.directory import generations
from checkpoint.directory.lock import Lock
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

_PATIENCE_SECONDS = 30


def fork(child: Callable[[], object] = lambda: None) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests have left threads
        number = os.fork()
    if number == 0:
        child()
        os._exit(0)
    return number


def fork_and_wait() -> None:
    _, status = os.waitpid(fork(), 0)
    assert status == 0


@contextmanager
def handler(action: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def in_time(action: Callable[[], object]) -> bool:
    """Whether an action ends, on a thread that holds nobody up who does not."""
    ended = threading.Event()

    def act() -> None:
        action()
        ended.set()

    threading.Thread(target=act, daemon=True).start()
    return ended.wait(_PATIENCE_SECONDS)


@pytest.mark.timeout(2 * _PATIENCE_SECONDS)
def test_fork_and_save_elsewhere_do_not_wait_for_a_directory_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    hangs, goes_on = threading.Event(), threading.Event()
    opening = Descriptor.open

    def hanging(self: Descriptor, path: Any, flags: int, *args: Any, **named: Any) -> None:
        if Path(path) == slow and flags & os.O_DIRECTORY and slow.is_dir():
            hangs.set()
            goes_on.wait()
        opening(self, path, flags, *args, **named)

    monkeypatch.setattr(Descriptor, "open", hanging)
    saving = threading.Thread(target=checkpoint.save, args=({"a": 1}, slow))
    saving.start()
    try:
        assert hangs.wait(_PATIENCE_SECONDS)
        # Here, and not on a thread: a child of one clears the main thread's variables, and of what
        # torch's DTensors keep there (a process group of other tests) that would be its end.
        fork_and_wait()
        assert in_time(lambda: checkpoint.save({"a": 2}, tmp_path / "fast"))
    finally:
        goes_on.set()
        saving.join()
    assert checkpoint.load(slow) == {"a": 1}
    assert checkpoint.load(tmp_path / "fast") == {"a": 2}


@pytest.mark.parametrize("step", ["open", "close"])
def test_handler_may_fork_and_save_where_the_main_thread_takes_or_gives_back_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "mine").mkdir()
    real, seen = getattr(Descriptor, step), list[str]()

    def act() -> None:
        with Lock(tmp_path):
            seen.append("locked")
        fork_and_wait()
        seen.append("forked")

    def interrupted(self: Descriptor, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        if not seen:
            seen.append("within")
            signal.raise_signal(signal.SIGUSR1)

    with handler(act):
        monkeypatch.setattr(Descriptor, step, interrupted)
        with Lock(tmp_path / "mine"):
            pass
    assert seen == ["within", "locked", "forked"]
    with Lock(tmp_path / "mine"):
        pass


def test_interrupt_of_the_removal_of_old_steps_comes_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    manager.save(1, {"a": 1})
    remove = generations.remove_generation
    threads: list[threading.Thread] = []

    def removed(*args: Any) -> None:
        threads.append(threading.current_thread())
        signal.raise_signal(signal.SIGINT)
        remove(*args)

    monkeypatch.setattr(generations, "remove_generation", removed)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, {"a": 2})
    assert threads
    assert threads[0] is not threading.main_thread()
    assert manager.steps() == [2]
    assert not manager.path(1).exists()


def test_child_forked_before_the_number_of_a_descriptor_is_known_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, closing, children = Descriptor.open, Descriptor.close, list[int]()

    def forking(self: Descriptor, *args: Any, **named: Any) -> None:
        opening(self, *args, **named)
        if not children:
            # The child knows of nothing to close.
            monkeypatch.setattr(Descriptor, "close", lambda _: None)
            children.append(fork(signal.pause))
            monkeypatch.setattr(Descriptor, "close", closing)

    monkeypatch.setattr(Descriptor, "open", forking)
    kept = Lock(tmp_path)
    try:
        kept.__enter__()
        kept._descriptor.close()  # as a process that is killed does, which unlocks nothing
        with Lock(tmp_path):
            pass
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 1


def test_directory_is_locked_although_children_are_forked_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, num_openings = Descriptor.open, list[None]()

    def forking(self: Descriptor, *args: Any, **named: Any) -> None:
        opening(self, *args, **named)
        num_openings.append(None)
        fork_and_wait()

    monkeypatch.setattr(Descriptor, "open", forking)
    lock = Lock(tmp_path)
    with lock:
        monkeypatch.setattr(Descriptor, "open", opening)
        with pytest.raises(BlockingIOError), Lock(tmp_path):
            pass
    assert 1 < len(num_openings) < 100
