"""Several pieces of work at once, each on a thread of its own.

concurrent.futures takes no work any more once the interpreter is on its way out; plain threads are
waited for, so that a save that runs then is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

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
    for error in sorted(errors, key=lambda error: isinstance(error, StoppedError)):
        raise error
    return [results[index] for index in range(len(tasks))]


def started(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does this. Raises OSError (EAGAIN) if there is none to be had."""
    thread = threading.Thread(target=run, name=name)
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(name) from error
    return thread
