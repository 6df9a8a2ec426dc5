"""Several pieces of work at once, each on a thread of its own.

concurrent.futures takes no work any more once the interpreter is on its way out; plain threads are
waited for, so that a save that runs then is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from aio.process.threads import WatchedThread, begun, is_refusal
from checkpoint.sheltered import StoppedError, no_thread

T = TypeVar("T")


def run_all(tasks: Sequence[Callable[[], T]], stop: Callable[[], None], name: str) -> list[T]:
    """Runs the tasks, the only one on this thread; gives their results in order.

    When one fails, or has no thread to be had, `stop` is called, which the others notice by
    themselves; all are waited for, then the first error that is no StoppedError is raised.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            begun()
            results[index] = tasks[index]()
        except BaseException as error:
            errors.append(error)
            stop()

    threads: list[threading.Thread] = []
    try:
        for index in range(len(tasks)):
            threads.append(started(partial(run, index), f"{name}-{index}"))
        for thread in threads:
            thread.join()
    except BaseException:
        stop()
        for thread in threads:
            thread.join()
        raise
    errors.sort(key=lambda error: isinstance(error, StoppedError))
    if errors:
        raise errors.pop(0)
    return [results[index] for index in range(len(tasks))]


def started(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does this, and calls `begun` in it. Raises OSError (EAGAIN) if there is none to
    be had, and MemoryError if that has no memory to begin with.
    """
    thread = WatchedThread(run, name, tells=True)
    try:
        thread.start()
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        raise no_thread(name) from error
    return thread


class _Asked(threading.local):
    """Whether this thread is within code of a program that a save asks for bytes."""

    by_save = False


asked = _Asked()


class Workers:
    """At most `count` threads that do what they are given, begun as there is work for them.

    Leaving the context waits until all of it is done.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has a thread do this. Raises OSError (EAGAIN) if there is none to be had."""
        done: Future[T] = Future()
        with self._lock:
            if len(self._threads) < self._count:
                try:
                    self._threads.append(started(self._run, f"{self._name}-{len(self._threads)}"))
                except OSError:
                    if not self._threads:  # fewer will do
                        raise
                    self._count = len(self._threads)
        self._work.put(partial(_complete, done, work))
        return done

    def _run(self) -> None:
        begun()
        while (work := self._work.get()) is not None:
            work()
            # Nothing of the last work outlives it while the thread waits.
            del work

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()


def _complete(done: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)
