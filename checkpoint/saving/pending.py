"""Saves that run in the background: their state, and what becomes of their errors.

Invariants: at most one background save to a path runs at a time, the next one waits for it, as for
any save that was interrupted and still removes what it made; an error is told once, by `result()`,
by the next save to the same path, or in the log, when another save begins or the interpreter ends,
whichever comes first. Everything of a save happens in the process that began it: to a forked child
it is over.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from aio.errors import check_seconds, let_go, without_frames
from aio.process.threads import Latch, say
from checkpoint.format.records import SaveInfo
from checkpoint.sheltered import Cancellation, Worker, join_workers, wait_for

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""How often one who waits for another save looks whether he is to stop."""


class PendingSave:
    """A save on its way to `path`.

    `after`, if given, is called on the save's own thread when it has succeeded, before it is done.
    """

    def __init__(self, path: Path, after: Callable[[], None] | None = None) -> None:
        self.path = path
        self.has_begun = Latch()
        """It runs in the background; or it never will, and has ended."""
        self.has_staged = Latch()
        self._done = Latch()
        self._is_refused = False
        self._listed: list[PendingSave] = []
        """Itself while it is to be told, in the list of those that nobody asked for."""
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._is_told = self._is_raised = False
        self._after = after
        self._cancellation = Cancellation()
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether the save has ended, in a durable checkpoint or in an error. Never blocks."""
        return self._done.is_set()

    def staged(self) -> bool:
        """Whether the tensors may change: their bytes have been read, or the save has failed."""
        return self.has_staged.is_set() or self._is_elsewhere()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Waits until `staged()`; False when that took longer than `timeout` seconds."""
        check_seconds("timeout", timeout)
        return self._is_elsewhere() or self.has_staged.wait(timeout)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Waits until `done()`; False when that took longer than `timeout` seconds.

        Raises RuntimeError in a forked child, as `result` does.
        """
        check_seconds("timeout", timeout)
        if not self.done() and self._is_elsewhere():
            raise RuntimeError(
                f"the save to {self.path} runs in process {self._pid}, and not in {os.getpid()}, "
                "which was forked from it: wait for it there"
            )
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> SaveInfo:
        """Waits until the checkpoint is durable.

        Raises what `save` would have raised, and TimeoutError when the save is still running after
        `timeout` seconds; it goes on.
        """
        if not self.wait_done(timeout):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout} s")
        try:
            self.tell()
            assert self._info is not None
            return self._info
        finally:
            del self  # as in `tell`

    def tell(self) -> None:
        """Raises the error of a save that is done, if it has one; it then counts as told."""
        error = self._error
        if error is None:
            return
        self._is_told = self._is_raised = True
        self._listed.clear()
        try:
            raise error
        finally:
            # Its traceback leads here, and to the frames of whoever is told: with a way back to it
            # all that they refer to would stay until the collector comes.
            del self, error

    def attended(self, cancellation: Cancellation) -> None:
        """For the save itself, first of all: its caller waits, and may ask it to stop by this."""
        self._cancellation = cancellation
        _registry.attended(self)

    @property
    def is_stopping(self) -> bool:
        """Whether its caller, who was interrupted, has asked it to stop."""
        return self._cancellation.is_requested

    def begin(self) -> None:
        """For the save itself: from now on it runs in the background."""
        _registry.started(self)
        self.has_begun.set()

    def check_begun(self) -> None:
        """Raises the error that kept it from beginning, if one did."""
        if self._is_refused:
            self.tell()

    def set_staged(self) -> None:
        """For the save itself: no tensor will be read again."""
        self.has_staged.set()

    def finish(self, outcome: SaveInfo | BaseException, *, is_told: bool = False) -> None:
        """For the save itself: how it ended; `is_told` if its caller knows of an error anyhow.

        Whatever becomes of that, those who wait go on: memory may end here too. What is to be done
        `after` leads to a manager with memory for copies, and this may be kept for long.
        """
        after, self._after = self._after, None
        if isinstance(outcome, BaseException):
            self._error = outcome
        else:
            self._info = outcome
        try:
            self._note(is_told)
            self.has_staged.set()
            if after is not None and self._error is None:
                try:
                    after()
                except BaseException:  # as below: somebody waits for the end
                    say(logger.exception, "after the background save to %s", self.path)
            _registry.ended(self)
        finally:
            self.has_staged.set()
            self._done.set()
            self.has_begun.set()
            del self, outcome  # the error, which is kept, may lead here

    def _note(self, is_told: bool) -> None:
        """What is known of an error, and who knows."""
        if self._error is None:
            return
        self._is_refused = not self.has_begun.is_set()
        self._is_told = self._is_raised = is_told or self._is_refused
        if self._is_refused:
            let_go(self._error)
        else:  # nobody may ask for it for long, and a frame has ways to what was to be saved
            lines = without_frames(self._error)
            self._error.add_note(f"raised by the background save to {self.path}:\n{lines}")

    def forget(self) -> None:
        """Of one that nobody has: its error, which was raised, may lead here."""
        self._error = None

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def is_untold(self) -> bool:
        """Whether it has failed and nobody knows."""
        return self._error is not None and not self._is_told

    @property
    def is_unraised(self) -> bool:
        """Whether it has failed, and that was logged at the most."""
        return self._error is not None and not self._is_raised

    def listed(self) -> list[PendingSave]:
        """For the registry: a list of this one, until it has been told."""
        self._listed = [self]
        return self._listed

    def log(self) -> None:
        """Tells its error in the log."""
        self._is_told = True
        self._listed.clear()
        logger.error(
            "the background save to %s failed, and nobody asked for its result",
            self.path,
            exc_info=self._error,
        )

    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid


class _Registry:
    """The saves of this process that run, and background saves that failed without being asked.

    Only threads of saves take its lock: no interrupt meets them with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attended: list[PendingSave] = []
        self._running: dict[Path, PendingSave] = {}
        self._failed: list[list[PendingSave]] = []
        """A list of one each, which the telling empties without the lock."""

    def attended(self, pending: PendingSave) -> None:
        with self._lock:
            self._attended.append(pending)

    def started(self, pending: PendingSave) -> None:
        with self._lock:
            self._running[pending.path] = pending

    def takes_place(self, pending: PendingSave) -> bool:
        """Whether it is the one in the background to its path from now on: another may have come
        first while it waited.
        """
        with self._lock:
            other = self._running.get(pending.path)
            if other is None or other.done():
                self._running[pending.path] = pending
                return True
            return False

    def ended(self, pending: PendingSave) -> None:
        with self._lock:
            self._attended = [one for one in self._attended if one is not pending]
            if self._running.get(pending.path) is pending:
                del self._running[pending.path]
            if pending.is_untold:
                self._failed = [one for one in self._failed if one]
                self._failed.append(pending.listed())

    def is_attended(self, path: Path) -> bool:
        """From any thread: without the lock, which an interrupt would leave held."""
        return any(one.path == path for one in list(self._attended))

    def running(self, path: Path) -> list[PendingSave]:
        """That in the background to this path, and those that are asked to stop."""
        with self._lock:
            stopping = [one for one in self._attended if one.path == path and one.is_stopping]
            return [*stopping, self._running[path]] if path in self._running else stopping

    def take_untold(self) -> list[PendingSave]:
        with self._lock:
            failed, self._failed = self._failed, []
        return [pending for one in failed for pending in list(one) if pending.is_untold]

    def forget(self) -> None:
        """In a forked child: these saves are the parent's, and so may be the lock."""
        self._lock = threading.Lock()
        self._attended, self._running, self._failed = [], {}, []


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.forget)


def is_being_saved(path: Path) -> bool:
    """Whether a save of this process is on its way to a path, from before it makes anything."""
    return _registry.is_attended(path)


def is_behind(path: Path) -> bool:
    """Whether there is one in the background, for which another one to that path would wait."""
    return bool(_registry.running(path))


def wait_for_place(
    pending: PendingSave, cancellation: Cancellation, before: PendingSave | None = None
) -> None:
    """`wait_for_earlier`, until this one is that in the background to its path. Several threads
    that wait for the same save go on at once when it ends, and one of them alone may begin.
    """
    wait_for_earlier(pending.path, cancellation, before)
    while not _registry.takes_place(pending):
        wait_for_earlier(pending.path, cancellation, before)


def wait_for_earlier(
    path: Path, cancellation: Cancellation, before: PendingSave | None = None
) -> None:
    """Waits for the background save to this path and for those that were interrupted and still
    remove what they made; `before` is one that belongs with it.

    Raises the error of either if nobody has been told of it; those of saves to other paths are no
    matter of this one, and logged. Raises StoppedError when it is to stop.
    """
    for pending in (*_registry.running(path), before):
        while pending is not None and not pending.wait_done(_LOOK_SECONDS):
            cancellation.check()
    own: list[PendingSave] = []
    for pending in _registry.take_untold():
        if pending is before or pending.path == path:
            own.append(pending)
        else:
            pending.log()
    for pending in own[:-1]:
        pending.log()
    for pending in own[-1:]:
        pending.tell()


_is_last = Latch()
"""Set when the interpreter waits for saves for the last time."""


def wait_at_exit(pending: PendingSave, worker: Worker[None]) -> None:
    """Waits for a save that began in a handler of `atexit` which comes behind ours, or in a
    finalizer beside them: the interpreter would not, and its error would be told by nobody. An
    interrupt stops it, as in the rest of the call.
    """
    if _is_last.is_set():
        wait_for(worker, worker.ended, is_started=True)
        if pending.is_untold:
            pending.log()


@atexit.register
def _tell_at_exit() -> None:
    _is_last.set()
    join_workers()
    for pending in _registry.take_untold():
        pending.log()
