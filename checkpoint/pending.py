"""Saves that run in the background: their state, and what becomes of their errors.

Invariants: at most one save to a path runs at a time, the next one waits for it; an error is told
once, by `result()`, by the next save, or at the end of the interpreter, whichever comes first.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from checkpoint.records import SaveInfo

logger = logging.getLogger(__name__)


class PendingSave:
    """A save on its way to `path`.

    `after`, if given, is called on the save's own thread when it has succeeded, before it is done.
    """

    def __init__(self, path: Path, after: Callable[[], None] | None = None) -> None:
        self.path = path
        self._staged = threading.Event()
        self._done = threading.Event()
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._after = after

    def done(self) -> bool:
        """Whether the save has ended, in a durable checkpoint or in an error. Never blocks."""
        return self._done.is_set()

    def staged(self) -> bool:
        """Whether the tensors may change: their bytes have been read, or the save has failed."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Waits until `staged()`; False when that took longer than `timeout` seconds."""
        return self._staged.wait(timeout)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Waits until `done()`; False when that took longer than `timeout` seconds."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> SaveInfo:
        """Waits until the checkpoint is durable.

        Raises what `save` would have raised, and TimeoutError when the save is still running after
        `timeout` seconds; it goes on.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout} s")
        if self._error is not None:
            _registry.forget(self)
            raise self._error
        assert self._info is not None
        return self._info

    def set_staged(self) -> None:
        """For the save itself: no tensor will be read again."""
        self._staged.set()

    def finish(self, outcome: SaveInfo | BaseException) -> None:
        """For the save itself: how it ended."""
        if isinstance(outcome, BaseException):
            outcome.add_note(f"raised by the background save to {self.path}")
            self._error = outcome
        else:
            self._info = outcome
        self._staged.set()
        if self._after is not None and self._error is None:
            try:
                self._after()
            except Exception:
                logger.exception("after the background save to %s", self.path)
        _registry.ended(self, failed=self._error is not None)
        self._done.set()

    @property
    def error(self) -> BaseException | None:
        return self._error


class _Registry:
    """The saves of this process that run, and those that failed and have not been asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Path, PendingSave] = {}
        self._untold: list[PendingSave] = []

    def started(self, pending: PendingSave) -> None:
        with self._lock:
            self._running[pending.path] = pending

    def ended(self, pending: PendingSave, *, failed: bool) -> None:
        with self._lock:
            if self._running.get(pending.path) is pending:
                del self._running[pending.path]
            if failed:
                self._untold.append(pending)

    def forget(self, pending: PendingSave) -> None:
        with self._lock:
            self._untold = [other for other in self._untold if other is not pending]

    def running(self, path: Path) -> PendingSave | None:
        with self._lock:
            return self._running.get(path)

    def take_untold(self) -> list[PendingSave]:
        with self._lock:
            untold, self._untold = self._untold, []
            return untold


_registry = _Registry()


def begin(path: Path, after: Callable[[], None] | None = None) -> PendingSave:
    """Registers a save, after the one to the same path has ended.

    Raises the error of an earlier background save that nobody has asked for yet.
    """
    settle(path)
    pending = PendingSave(path, after)
    _registry.started(pending)
    return pending


def settle(path: Path) -> None:
    """Waits for a background save to this path, and raises an error not told yet, of any path."""
    running = _registry.running(path)
    if running is not None:
        running.wait_done()
    untold = _registry.take_untold()
    for other in untold[1:]:
        logger.error("the background save to %s failed: %s", other.path, other.error)
    if untold and untold[0].error is not None:
        raise untold[0].error


def _tell_at_exit() -> None:
    for pending in _registry.take_untold():
        logger.error(
            "the background save to %s failed, and nobody asked for its result",
            pending.path,
            exc_info=pending.error,
        )


atexit.register(_tell_at_exit)
