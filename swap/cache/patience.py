"""Waiting for memory that others drop, and when that is given up.

Who holds memory and is at work drops it by himself: an update that copies, a forward pass on
another thread. For those it is waited longer than for the program, which may hold what it likes.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

LOOKS = 40
_LOOKS_AT_WORK = 10 * LOOKS
_COLLECT_AFTER = 4


class Patience:
    """One wait, ``seconds`` long or ten times that.

    It is counted in looks at what came back, not by a clock: a process that is stopped, or that
    gets no processor, misses none.
    """

    def __init__(self, seconds: float) -> None:
        self._look_seconds = seconds / LOOKS
        self._looks = 0

    def waits(self, wait_for_release: Callable[[float], bool], *, is_at_work: bool = False) -> bool:
        """Wait for a moment; False when that was long enough. ``is_at_work``: so is somebody who
        holds memory.

        What cycles of garbage hold comes back when the collector finds them, which is a matter of
        chance, or of months where a program has disabled it. They are the program's (an error that
        is kept by its own frame, a closure that names itself), so they are looked for here.
        """
        if wait_for_release(self._look_seconds):
            self._looks = 0
            return True
        self._looks += 1
        if self._looks == _COLLECT_AFTER:
            gc.collect()
        return self._looks <= (_LOOKS_AT_WORK if is_at_work else LOOKS)


class Workers:
    """Who holds memory, and on which thread. Any number of threads, which take no lock: each
    changes what is its own, and sees of others what is there.
    """

    def __init__(self) -> None:
        self._threads: dict[Hashable, int] = {}
        self._waiting: set[int] = set()

    def add(self, holder: Hashable) -> None:
        """``holder``, on this thread, holds memory until it is discarded."""
        self._threads[holder] = threading.get_ident()

    def discard(self, holder: Hashable) -> None:
        """Idempotent."""
        self._threads.pop(holder, None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """This thread holds memory inside."""
        holder = object()
        self.add(holder)
        try:
            yield
        finally:
            self.discard(holder)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread waits for memory inside, and drops none."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            yield
        finally:
            self._waiting.discard(thread)

    @property
    def is_another_at_work(self) -> bool:
        """Whether one on another thread holds memory and does not wait for more."""
        idle = {threading.get_ident(), *self._waiting.copy()}
        return not idle.issuperset(self._threads.copy().values())
