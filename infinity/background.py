"""Saves of a model, in the background or on other threads, and what has to wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from checkpoint import PendingSave

T = TypeVar("T")


class BackgroundSaves:
    """They read values where they are kept: whatever changes values there waits until they have
    been read. The hooks of a step do so, too, as the guard of each save that began before.
    """

    def __init__(self) -> None:
        self._pending: list[PendingSave] = []
        self._of_now: list[PendingSave] = []  # those of what a step is to change
        self._turns: list[tuple[threading.Lock, int]] = []  # of calls, and on which threads
        self._is_over = False
        self._num_others = 0
        """Saves that failed behind the first one, and were logged and forgotten."""

    def before_end(self, call: Callable[[], T]) -> T:
        """What ``call`` gives, which the end of the block waits for; it is to ``check_open``."""
        own = (turn := threading.Lock(), threading.get_ident())
        with turn:
            try:
                self._turns.append(own)
                return call()
            finally:
                with suppress(ValueError):  # an interrupt came before it was there
                    self._turns.remove(own)

    def check_open(self) -> None:
        """Raises ``RuntimeError`` where the block ends."""
        if self._is_over:
            raise RuntimeError(
                "the block of the model ends, and what is in it cannot be saved any more: save it, "
                "and wait for threads that do, inside the `with` block"
            )

    @property
    def is_over(self) -> bool:
        """Whether the block ends: it may not wait for a ``call`` that began after that."""
        return self._is_over

    def end(self) -> None:
        """The block ends: wait for calls of other threads; later ones are refused. Idempotent."""
        self._is_over = True  # who does not see that has its turn among these
        for turn, thread in [*self._turns]:
            if thread != threading.get_ident():
                with turn:
                    pass

    def add(self, save: PendingSave, *, is_of_now: bool = True) -> None:
        """A save that has been started. Other threads may add theirs meanwhile, and a handler of a
        signal: each is known from its first moment, and nobody takes it away but by itself. What
        is not ``is_of_now`` reads a snapshot, which never changes.
        """
        if is_of_now:
            self._of_now.append(save)
        self._pending.append(save)
        ended = [one for one in [*self._pending] if one.done()]
        failed = [one for one in ended if one.is_unraised]
        kept = failed[:1] + [one for one in failed[1:] if one.is_untold]
        for one in (one for one in ended if one not in kept):
            with suppress(ValueError):  # or another has been here
                self._pending.remove(one)
                self._num_others += one in failed
                self._of_now.remove(one)

    def wait_read(self) -> None:
        """Wait until values may change: every save has read them, or has failed."""
        for save in [*self._of_now]:
            save.wait_staged()
            with suppress(ValueError):
                self._of_now.remove(save)

    def wait_done(self) -> None:
        """Wait until every save has ended."""
        for wait in self.waits():
            wait()

    def waits(self) -> list[Callable[[], object]]:
        """A wait for each save that may not have ended."""
        return [save.wait_done for save in [*self._pending]]

    def tell_at_end(self, kind: object, error: object, trace: object) -> None:
        """The end of a block, when all have ended: raises the error of one that failed and that
        nobody asked, be it logged as another save began, unless another error is on its way. The
        others are logged.
        """
        failed = [save for save in self._pending if save.is_unraised]
        for save in failed if kind is not None else failed[1:]:
            if save.is_untold:
                save.log()
        num_others = self._num_others + len(failed[1:])
        if failed and kind is None:
            if num_others and failed[0].error is not None:
                failed[0].error.add_note(f"{num_others} more saves failed, see the log")
            self._pending.clear()
            try:
                failed[0].tell()
            finally:
                del failed
