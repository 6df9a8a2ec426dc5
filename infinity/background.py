"""Saves of a model that run in the background, and what has to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from checkpoint import PendingSave


class BackgroundSaves:
    """They read values where they are kept: whatever changes values there waits until they have
    been read. Steps do so by themselves, as the guard of the save.
    """

    def __init__(self) -> None:
        self._pending: list[PendingSave] = []
        self._num_others = 0
        """Saves that failed behind the first one, and were logged and forgotten."""

    def add(self, save: PendingSave) -> None:
        """A save that has been started. Other threads may add theirs meanwhile, and a handler of a
        signal: each is known from its first moment, and nobody takes it away but by itself.
        """
        self._pending.append(save)
        ended = [one for one in [*self._pending] if one.done()]
        failed = [one for one in ended if one.is_unraised]
        kept = failed[:1] + [one for one in failed[1:] if one.is_untold]
        for one in (one for one in ended if one not in kept):
            with suppress(ValueError):  # or another has been here
                self._pending.remove(one)
                self._num_others += one in failed

    def wait_read(self) -> None:
        """Wait until values may change: every save has read them, or has failed."""
        for save in [*self._pending]:
            save.wait_staged()

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
