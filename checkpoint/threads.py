"""Several pieces of work at once, each on a thread of its own.

concurrent.futures takes no work any more once the interpreter is on its way out; plain threads are
waited for, so that a save that runs then is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from aio.process.threads import Latch, WatchedThread, begun, is_refusal, take_turns
from checkpoint.sheltered import StoppedError, no_thread

T = TypeVar("T")


def run_all(tasks: Sequence[Callable[[], T]], stop: Callable[[], None], name: str) -> list[T]:
    """Runs the tasks, the only one on this thread; gives their results in order.

    When one fails, or has no thread to be had, `stop` is called, which the others notice by
    themselves; all are waited for, then the first error that is no StoppedError is raised, and
    none is kept: each leads to the function that has all of them.
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
        errors.clear()
        raise
    errors.sort(key=lambda error: isinstance(error, StoppedError))
    if errors:
        del errors[1:]
        raise errors.pop()
    return [results[index] for index in range(len(tasks))]


def started(run: Callable[[], None], name: str) -> WatchedThread:
    """A thread that does this, and calls `begun` or `take_turns` in it. Raises OSError (EAGAIN) if
    there is none to be had, and MemoryError if that has no memory to begin with.
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


class Outcome(Generic[T]):
    """What work on another thread gives or raises, for those who wait for its end."""

    def __init__(self) -> None:
        self._is_done = False
        self._has_ended = Latch()
        self._result: T | None = None
        self._error: BaseException | None = None

    def of(self, work: Callable[[], T]) -> bool:
        """Does the work, once; gives whether it raised nothing. To be called again where there was
        no memory to tell of its end.
        """
        try:
            try:
                if not self._is_done:
                    self._result = work()
            except BaseException as error:
                self._error = error  # first: there may be no memory for what follows
            self._is_done = True
            self._has_ended.set()
            return self._error is None
        finally:
            del self, work  # an error that is kept leads to this frame

    def is_there(self) -> bool:
        """Whether the work has ended."""
        return self._has_ended.is_set()

    def wait(self) -> None:
        """Until the work has ended."""
        self._has_ended.wait()

    def result(self) -> T:
        """Waits; gives or raises what the work did. Its error is kept no more: it leads to whoever
        is told, who has this. Asked again it raises StoppedError.
        """
        self._has_ended.wait()
        error = self._error
        try:
            self.forget()
            if error is not None:
                raise error
            return self._result  # type: ignore[return-value]
        finally:
            del self, error  # as in `of`

    def forget(self) -> None:
        """Of work that has ended: its error is asked for no more."""
        if self._error is not None:
            self._error = StoppedError("it failed, and somebody knows")


class Workers:
    """At most `count` threads that do what they are given, begun as there is work for them.

    Leaving the context waits until all of it is done.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._lock = threading.Lock()
        self._threads: list[WatchedThread] = []
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Outcome[T]:
        """Has a thread do this. Raises OSError (EAGAIN) if there is none to be had."""
        done: Outcome[T] = Outcome()
        with self._lock:
            if len(self._threads) < self._count:
                try:
                    self._threads.append(started(self._run, f"{self._name}-{len(self._threads)}"))
                except OSError:
                    if not self._threads:  # fewer will do
                        raise
                    self._count = len(self._threads)
        self._work.put(partial(done.of, work))
        return done

    def _run(self) -> None:
        work: Callable[[], object] | None = None
        is_taken = False

        def turn() -> bool:
            nonlocal work, is_taken
            if not is_taken:
                work = self._work.get()
                is_taken = True
            if work is None:
                return False
            work()
            # Nothing of the last work outlives it while the thread waits.
            work, is_taken = None, False
            return True

        take_turns(turn)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
