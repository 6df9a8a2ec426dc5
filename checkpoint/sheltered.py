"""Work that no signal handler can break into.

Python runs signal handlers between two steps of the main thread, and what they raise (Ctrl-C is a
KeyboardInterrupt) comes up there: behind a rename and before the line that takes note of it, behind
the taking of a lock and before the block that lets go of it. So what takes, publishes or undoes
anything runs on a thread of its own, where handlers never run, and the main thread only waits. An
interrupt ends the waiting: the work is asked to stop, puts away what it has, and is waited for.

Invariants of the handing over, at whatever step an interrupt comes: the work begins at most once,
and never after `withdraw` has found it not begun; nothing that the main thread holds, a lock above
all, is ever waited for by the work.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from aio.errors import let_go
from aio.process.threads import (
    Latch,
    WatchedThread,
    begun,
    is_refusal,
    start_apart,
    why_no_thread,
)

T = TypeVar("T")
_START_SECONDS = 0.001
"""In which a thread that is being started may be one that runs."""
_MOST_START_SECONDS = 10.0
"""One that takes longer never will run, and is not waited for."""


class StoppedError(Exception):
    """Work that gave up because other work had failed, or because it was interrupted: `interrupt`
    says by what then, as `describe` does.
    """

    def __init__(self, what: str = "", *, interrupt: str = "") -> None:
        super().__init__(what)
        self.interrupt = interrupt


def describe(error: BaseException) -> str:
    """An exception in one line, its kind first. Of work that was interrupted it is the interrupt:
    who hears of it by another rank has no use for the way on which it came to the work.
    """
    if isinstance(error, StoppedError) and error.interrupt:
        return error.interrupt
    try:
        what = str(error)
    except Exception:  # of a class that is not ours, and what it is to say is its kind at least
        what = ""
    return f"{type(error).__name__}: {what}"


class Cancellation:
    """Asks work to stop. The work looks at it wherever it can leave nothing behind."""

    def __init__(self) -> None:
        self.is_requested = False
        self._interrupt = ""  # its text alone: its traceback leads to whoever waits for the work

    def request(self, interrupt: BaseException | None = None) -> None:
        """Idempotent, from any thread. The first `interrupt` that is given is why."""
        if interrupt is not None and not self.is_requested:
            self._interrupt = describe(interrupt)
        self.is_requested = True

    def check(self) -> None:
        """Raises StoppedError if the work is to stop."""
        if self.is_requested:
            raise StoppedError("interrupted", interrupt=self._interrupt)


class _Thread(WatchedThread):
    """The thread of a worker."""


def join_workers() -> None:
    """Waits for workers that began when the interpreter had waited for threads: those of atexit
    handlers. It ends the process by a signal if they still let go of tensors when it is gone.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _Thread):
            until = time.monotonic() + _MOST_START_SECONDS
            while thread in threading.enumerate():
                try:
                    thread.join()
                except RuntimeError:  # that of whoever was interrupted, and still being started
                    if time.monotonic() > until:
                        raise
                    time.sleep(_START_SECONDS)


class Worker(Generic[T]):
    """A piece of work and the thread that it runs on, which the interpreter waits for at its end.

    `work` is given the cancellation. Its result or its error is kept for `outcome`.
    """

    def __init__(self, work: Callable[[Cancellation], T], name: str) -> None:
        self.cancellation = Cancellation()
        self.ended = Latch()
        self._work = [work]  # taken by whoever does it
        self._name = name
        self._claim: dict[str, str] = {}  # by who begins the work or withdraws it, for ever
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begins. Raises OSError (EAGAIN) if there is no thread to be had, and MemoryError if that
        has no memory to begin with.

        After any other exception, an interrupt, it may have begun: see `withdraw`. Called again, it
        begins if it has not.
        """
        # `Thread.start` is many steps, between which an interrupt would leave half a thread. This
        # is one: either it has been made or it has not. It makes the thread that counts.
        try:
            start_apart(_Thread(self._run, self._name, tells=True))
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            raise no_thread(self._name) from error

    def withdraw(self, interrupt: BaseException | None = None) -> None:
        """Asks it to stop, because of an `interrupt`; if it has not begun, it never will. Then
        `ended` will be set.

        Where it is interrupted itself, to be called again.
        """
        self.cancellation.request(interrupt)
        if self._claimed_for("nothing"):
            self._work.clear()
            self.ended.set()

    def outcome(self) -> T:
        """What the work gave, when it has ended. Raises what it raised, which it keeps no more."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            work = self._work.pop()
        except IndexError:  # another thread has it, or it was withdrawn
            begun()
            return
        ended = self.ended
        try:
            begun()
            if self._claimed_for("work"):
                self._result = work(self.cancellation)
        except BaseException as error:
            self._error = error  # first: there may be no memory for what follows
            let_go(error)
        finally:
            del work
            del self  # an error that is kept leads to this frame
            ended.set()

    def _claimed_for(self, what: str) -> bool:
        """Whether it is to do this, "work" or "nothing": what comes first."""
        return self._claim.setdefault("what", what) == what


def sheltered(work: Callable[[Cancellation], T], name: str) -> T:
    """Does the work where no handler runs, and waits for it; gives or raises what it did.

    Another thread than the main one is such a place itself.

    An interrupt of the waiting is raised when the work has ended, however many come: work that
    writes to tensors of the caller must not go on behind his back.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(Cancellation())
    worker = Worker(work, name)
    try:
        worker.start()
        worker.ended.wait()
    except BaseException as interrupt:
        # Not in a function of its own: where two signals come at once, what the handler of the
        # second raises comes up at the very next call, and that has to be within the inner block.
        while True:
            try:
                worker.withdraw(interrupt)
                worker.ended.wait()
                break
            except BaseException:  # there is one interrupt on its way, which says so
                pass
        raise
    return worker.outcome()


def wait_for(worker: Worker[T], latch: Latch, *, is_started: bool = False) -> None:
    """Starts a worker and waits for one of its latches, which is set when it has ended at last.

    An interrupt is raised when the work has ended, also where two signals come at once; another one
    that comes while that is waited for is raised at once: the work, which changes nothing of the
    caller's, has been asked to stop and ends by itself. A disk that hangs must not hold the caller.
    """
    try:
        if not is_started:
            worker.start()
        latch.wait()
    except BaseException as interrupt:
        while True:
            try:
                worker.withdraw(interrupt)
                break
            except BaseException:  # as in `sheltered`
                pass
        worker.ended.wait()
        raise


def no_thread(name: str) -> OSError:
    """The error of a thread that could not be started."""
    return OSError(
        errno.EAGAIN,
        f"cannot start the thread {name}: {why_no_thread()}",
    )
