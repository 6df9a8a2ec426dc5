"""Requests, and what becomes of them.

An Operation is the caller's half, its Ticket the engine's. While a request is in flight the engine
holds the ticket and the exported buffer, never the operation: a buffer is free as soon as its
completion is reaped and the caller lets go of it.

There are no locks in here. A ticket is completed once, by the engine's reaper thread, or by whoever
submits what never comes to C; everybody else appends to a list first and looks at the outcome
afterwards, so that one of the two sides always sees the other.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from aio.errors import AioError, check_seconds, transfer_error
from aio.process import unasked
from aio.process.threads import is_main_thread, say

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import numpy.typing as npt
    from typing_extensions import Buffer

    from aio.files import File

    # Before Python 3.12 type checkers do not know that arrays export their memory.
    BufferLike: TypeAlias = Buffer | npt.NDArray[Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer between `buffer` and the bytes of `file` from `offset` on.

    `buffer` is any C-contiguous object with the buffer protocol, all of whose bytes are moved;
    writable for a read, and without references to Python objects. Offset, length and address may
    be anything; those that are multiples of the file's alignments go straight to the device.
    """

    kind: Literal["read", "write"]
    file: "File"
    offset: int
    buffer: "BufferLike"


class Outcome(NamedTuple):
    """How a transfer ended. `errno` is 0 when all its bytes moved. Times are CLOCK_MONOTONIC."""

    transferred: int
    errno: int
    started: float
    finished: float


_CANCELED = Outcome(0, errno.ECANCELED, 0.0, 0.0)


class Host(Protocol):
    """What a ticket needs to know of the engine."""

    pid: int

    def on_reaper(self) -> bool:
        """Whether the calling thread is the one that settles tickets."""


class Ticket:
    """The engine's half of an operation."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_waiters",
        "file",
        "host",
        "kind",
        "nbytes",
        "offset",
        "outcome",
    )

    def __init__(self, host: Host, request: Request, nbytes: int) -> None:
        self.host = host
        self.kind = request.kind
        self.file = request.file
        self.offset = request.offset
        self.nbytes = nbytes
        self.outcome: Outcome | None = None
        self._waiters: list[threading.Lock] = []  # held; released to wake one thread each
        self._callbacks: list[Callable[[], None]] = []

    def complete(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.errno:
            unasked.watch(self, self.file.first_error, self.error(outcome))
        self._wake()
        self._run_callbacks()

    def cancel(self) -> None:
        """It never was in flight, and its caller has what kept it; may be repeated after an
        interrupt.
        """
        self.outcome = _CANCELED
        self._wake()

    def _wake(self) -> None:
        if not self._waiters:  # a list takes memory
            return
        for waiter in list(self._waiters):  # each takes itself off the list
            with contextlib.suppress(RuntimeError):  # it was woken before
                waiter.release()

    def wait(self, timeout: float | None) -> bool:
        """Whether the outcome came within `timeout` seconds."""
        if self.outcome is None and (timeout is None or timeout > 0):
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if self.outcome is None:
                waiter.acquire(
                    timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
                )
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self.outcome is not None

    def add_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self.outcome is not None:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                callback = self._callbacks.pop(0)  # by one thread only, whoever comes first
            except IndexError:
                break
            try:
                callback()
            except BaseException as error:  # who reaps for everybody must not end with one caller
                if is_main_thread() and not isinstance(error, Exception):
                    interrupt = interrupt or error  # of the program, which is to end
                else:
                    say(logger.exception, "a callback of the %s raised", self.describe())
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # its traceback leads to this frame

    def describe(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes at offset {self.offset} of {self.file.path}"

    def error(self, outcome: Outcome) -> OSError:
        """A new exception for one that failed."""
        return transfer_error(
            self.kind,
            os.fspath(self.file.path),
            self.offset,
            self.nbytes,
            errno=outcome.errno,
            transferred=outcome.transferred,
        )


class Operation:
    """One submitted request. The engine makes them; see Engine.submit.

    Letting go of an operation does not cancel it. When no error of a file is ever asked
    for, the first is logged, once its operation has been let go of (see aio.process.unasked).
    """

    __slots__ = ("_ticket", "request")

    def __init__(self, request: Request, ticket: Ticket) -> None:
        self.request = request
        self._ticket = ticket

    def done(self) -> bool:
        """Whether the transfer has ended, in success or failure. Never blocks."""
        return self._ticket.outcome is not None

    def result(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the bytes moved: always all of them.

        Raises AioError when the transfer could not be completed, TimeoutError when it has not
        ended after `timeout` seconds (it goes on, and the engine keeps the buffer),
        and RuntimeError where waiting could never end: inside a callback of the same engine, or
        in a forked child.
        """
        check_seconds("timeout", timeout)
        ticket = self._ticket
        if ticket.outcome is None:
            self._check_may_wait()
            if not ticket.wait(timeout):
                raise TimeoutError(f"{ticket.describe()} has not ended after {timeout} s")
        outcome = self._outcome()
        if outcome.errno:
            ticket.file.first_error.take()
            # In no variable: its traceback leads to this frame, and to the buffer of its callers.
            raise ticket.error(outcome)
        return ticket.nbytes

    def abandon(self) -> None:
        """Waits for the end and forgets how it ended: another error is on its way, or the bytes are
        of no use any more. RuntimeError as `result`.
        """
        try:
            self.result()
        except AioError:
            return

    def add_done_callback(self, callback: "Callable[[Operation], object]") -> None:
        """Calls `callback(self)` once the transfer has ended; at once if it has.

        It runs on the engine's reaper thread (or, if at once, on this one): keep it short, every
        other completion waits for it. What it raises is logged, but for Ctrl-C and SystemExit on
        the main thread.
        """
        self._ticket.add_callback(lambda: _ignore(callback(self)))

    @property
    def started_at(self) -> float:
        """When its first block went to the backend, on the clock of time.perf_counter().

        RuntimeError while the operation is not done.
        """
        return self._outcome().started

    @property
    def finished_at(self) -> float:
        """When its last block came back, on the same clock. RuntimeError while it is not done."""
        return self._outcome().finished

    def _outcome(self) -> Outcome:
        outcome = self._ticket.outcome
        if outcome is None:
            raise RuntimeError(f"{self._ticket.describe()} has not ended: ask for result() first")
        return outcome

    def _check_may_wait(self) -> None:
        host = self._ticket.host
        if host.pid != os.getpid():
            raise RuntimeError(
                f"{self._ticket.describe()} was submitted in process {host.pid} and cannot end in"
                f" process {os.getpid()}, which was forked from it"
            )
        if host.on_reaper() and self._ticket.outcome is None:
            raise RuntimeError(
                f"{self._ticket.describe()} has not ended, and waiting for it in a callback would"
                " stop the thread that reaps completions: use add_done_callback"
            )

    def __repr__(self) -> str:
        state = "done" if self.done() else "in flight"
        return f"<Operation {self._ticket.describe()}, {state}>"


def _ignore(_: object) -> None:
    """Callbacks return what they like."""
