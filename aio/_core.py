"""What is left of an engine when the caller has let go of it: the C engine, the requests in
flight, and the thread that reaps them.

Invariants: from the moment a request is handed to C until its completion is reaped, `_in_flight`
holds its exported buffer and its file, whatever happens to the caller's objects. A ticket that was
ever in it is completed, also if it never came to C: others may wait for it. The C engine is
freed when it has drained and no thread is inside one of its calls.
"""

import atexit
import errno
import logging
import os
import re
import threading
import weakref
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aio._native import ffi, lib
from aio.errors import check_int
from aio.files import MAX_OFFSET, File
from aio.opening import warn_buffered
from aio.operation import Operation, Outcome, Request, Ticket
from aio.process.threads import Changes, Latch, Thread, join_thread, say, start_thread
from aio.process.unasked import tell

if TYPE_CHECKING:
    from aio.operation import BufferLike

logger = logging.getLogger(__name__)

_REAP_MAX = 256
# Looked up here, as that takes memory.
_wait_for_memory, _let_go = lib.aio_wait_for_memory, ffi.release
_MAX_SHORTAGES = 100
"""So often where it need not be memory that lacks, or an error on its way may have others give it
back."""
# In the format of a buffer of structures.
_FIELD_NAME = re.compile(":[^:]*:")
_KINDS = {"read": lib.AIO_READ, "write": lib.AIO_WRITE}

_Handed: TypeAlias = "tuple[Any, int, Ticket, Any, _Handed | None]"
"""What C is given of a request, its token, its ticket and its buffer, and the same of another one:
what goes through a list takes memory.
"""
_live: "set[Core]" = set()
_has_closed_all = Latch()
"""The process ends, and waits for no engine that is made from here on: each transfer is waited for
as it is submitted.
"""


class Core:
    """Owns a C engine. The reaper thread keeps it alive until it is stopped and drained."""

    def __init__(self, slot: Any) -> None:
        """`slot` is what `aio.backends.start` returns: a C engine and what frees it.

        Raises AioError when there is no thread to be had.
        """
        self.pid = os.getpid()
        # Guards the counts of the files and closing. A finalizer may close a file inside any
        # allocation, also one made with the lock held: hence an RLock.
        self.lock = threading.RLock()
        self.changes = Changes()  # a closed file has no operation left
        self._slot: Any = slot
        self._closing = False
        # What warns of a file that is dropped before it is closed.
        self.open_files: set[weakref.ref[File]] = set()
        self._tokens = count()
        self._in_flight: dict[int, tuple[Ticket, Any]] = {}
        # Here, where an error has somebody to be raised to.
        self._completions = ffi.new("aio_completion[]", _REAP_MAX)
        self._num_reaped = self._num_settled = 0  # of them; the reaper thread's own
        self._has_drained = False
        self._thread = Thread(_reap, "aio-reaper", (self,), tells=True)
        try:
            start_thread(self._thread)
            _live.add(self)
        except BaseException:
            self.stop()
            raise

    def on_reaper(self) -> bool:
        return threading.current_thread() is self._thread

    def is_forked(self) -> bool:
        return os.getpid() != self.pid

    def check_process(self) -> None:
        """RuntimeError in a forked child, which has none of the threads, and of what they had
        locked nothing that will ever be unlocked.
        """
        if self.is_forked():
            raise RuntimeError(
                f"an engine of process {self.pid} cannot be used in process {os.getpid()}, which"
                " was forked from it: make an engine in each process"
            )

    def check_usable(self) -> None:
        """RuntimeError in a forked child, ValueError once closed."""
        self.check_process()
        if self._closing:
            raise ValueError("the engine is closed")

    def submit(self, requests: Sequence[Request], lane: int) -> list[Operation]:
        """See Engine.submit. `lane` is -1 for the least loaded one."""
        self.check_usable()
        _check_requests(requests)
        batch = ffi.new("aio_request[]", len(requests))
        entries: dict[int, tuple[Ticket, Any]] = {}
        handed: _Handed | None = None
        operations: list[Operation] = []
        for native, request in zip(batch, requests, strict=True):
            view = _export(request)
            native.token = token = next(self._tokens)
            native.file = request.file.native_for(self, request.kind)
            native.data = view
            native.offset = _checked_offset(request, len(view))
            native.nbytes = len(view)
            native.kind = _KINDS[request.kind]
            ticket = Ticket(self, request, len(view))
            entries[token] = ticket, view
            handed = native, token, ticket, view, handed
            operations.append(Operation(request, ticket))
        is_late = _has_closed_all.is_set() and not self.on_reaper()
        self._hand_over(batch, entries, handed, lane)
        if is_late:
            for ticket, _ in entries.values():
                ticket.wait(None)
        return operations

    def _hand_over(
        self,
        batch: Any,
        entries: dict[int, tuple[Ticket, Any]],
        handed: "_Handed | None",
        lane: int,
    ) -> None:
        """Queues the batch in C; blocks without the GIL while the lane is full."""
        slot = self._slot  # keeps the C engine until this call is over
        try:
            self._count(entries)
            error = -lib.aio_engine_submit(slot[0], batch, len(batch), lane)
            if error == errno.ENOMEM:
                raise MemoryError(f"cannot queue {len(batch)} requests: there is no memory")
            if error:  # the engine is being closed meanwhile, or the lane cannot be woken
                for native in batch:
                    if not native.accepted:
                        self._complete(native.token, Outcome(0, error, 0.0, 0.0))
            # Nothing takes memory on the way back: what is queued has operations.
        except BaseException:
            # An interrupt may have kept the call from being made. C says what it will report; of
            # the rest nobody has an operation, but whoever drains may wait for it. Nothing of this
            # takes memory, unless somebody waits already.
            num_shortages = 0
            while True:
                try:
                    while handed is not None:
                        native, token, ticket, view, following = handed
                        if not native.accepted:
                            self._release(token, ticket, view)
                            ticket.cancel()
                            self._in_flight.pop(token, None)
                        handed = following
                    break
                except MemoryError:  # the caller may be the one who can give some back
                    num_shortages += 1
                    if num_shortages > _MAX_SHORTAGES:
                        raise
                    _wait_for_memory()
                except Exception:  # not of a signal: it would come up again at every turn
                    raise
                except BaseException:  # another interrupt; what is left here would never end
                    pass
            raise

    def _count(self, entries: dict[int, tuple[Ticket, Any]]) -> None:
        with self.lock:
            if self._closing or self._slot is None:
                raise ValueError("the engine is closed")
            for ticket, _ in entries.values():
                ticket.file.check_open()
            for token, (ticket, _) in entries.items():
                ticket.file.in_flight.add(token)
            self._in_flight.update(entries)

    def _complete(self, token: int, outcome: Outcome) -> None:
        """May be repeated where there was no memory, until the token is in flight no more."""
        ticket, view = self._in_flight[token]
        error = self._release(token, ticket, view)
        ticket.complete(outcome)
        self._in_flight.pop(token, None)
        if error is not None:  # after the outcome: a log may be slow
            say(logger.error, "cannot close %s: %s", ticket.file.path, error)

    def _release(self, token: int, ticket: Ticket, view: Any) -> OSError | None:
        """The kernel has nothing of it any more, whether or not it ever had. May be repeated.

        Returns what closing the file raised: this may be the thread that reaps for everybody.
        """
        _let_go(view)  # first: whoever sees the outcome may expect the buffer to be free
        file = ticket.file
        file.in_flight.discard(token)
        try:
            self.close_if_unused(file)
        except OSError as error:
            return error
        return None

    def close_if_unused(self, file: File) -> None:
        """For whoever has used a file: closes it if only he was waited for.

        Takes no lock where there is more to wait for: a finalizer may be waiting within it.
        """
        if not (file.is_closed and file.is_unused):  # whoever changes that looks then
            return
        with self.lock:
            if file.is_closed and file.is_unused:
                self.changes.tell()  # first: they look with the lock held
                file.close_descriptors()

    def reap(self) -> None:
        """The reaper thread: returns when the engine is stopped and has drained.

        Everybody waits for it: where there is no memory, it goes on when there is some.
        """
        self._thread.take_turns(self._reap_some)

    def _reap_some(self) -> bool:
        """Goes on where the last call was left; False when all is done. Between C's answer and its
        being noted nothing takes memory: Python keeps numbers up to _REAP_MAX at hand.
        """
        if self._has_drained:  # and there was no memory to say so
            return False
        while self._num_settled < self._num_reaped:
            self._settle(self._completions[self._num_settled])
            self._num_settled += 1
            tell()
        if self._slot is not None:
            num_reaped = lib.aio_engine_reap(self._slot[0], self._completions, _REAP_MAX)
            self._num_settled = 0
            self._num_reaped = num_reaped
        if not self._num_reaped:
            with self.lock:
                self._closing = True
                self._slot = None
            _live.discard(self)
            self._has_drained = True
        return not self._has_drained

    def _settle(self, native: Any) -> None:
        """May be repeated where there was no memory."""
        token = native.token
        entry = self._in_flight.get(token)
        if entry is not None:  # else it has ended, and there was no memory for what follows
            file = entry[0].file
            is_news = bool(native.direct_refused) and file.direct_was_refused()
            self._complete(
                token,
                Outcome(native.transferred, native.error, native.started, native.finished),
            )
            if is_news:
                say(warn_buffered, file.device, file.path, file.direct_reason)

    def drain(self) -> None:
        """See Engine.drain."""
        self.check_process()
        if self.on_reaper():
            raise RuntimeError(
                "waiting in a callback until an engine has drained would stop the thread that"
                " reaps completions: wait elsewhere"
            )
        for ticket, _ in list(self._in_flight.values()):
            ticket.wait(None)

    def stop(self) -> None:
        """Takes nothing more and lets the lanes drain. Returns at once; callable anywhere."""
        if self.is_forked():
            return
        self._closing = True
        slot = self._slot
        if slot is not None:
            lib.aio_engine_stop(slot[0])

    def close(self) -> None:
        """Stops, and waits until everything has been reaped and freed.

        On the reaper thread itself, and in a forked child, there is nothing to wait for.
        """
        self.stop()
        if not self.is_forked() and not self.on_reaper():
            join_thread(self._thread)


def _reap(core: Core) -> None:
    core.reap()


def _check_requests(requests: object) -> None:
    if not isinstance(requests, Sequence):
        raise TypeError(f"requests is a {type(requests).__name__}, not a sequence of Requests")
    for request in requests:
        if not isinstance(request, Request):
            raise TypeError(f"requests has a {type(request).__name__}, which is not a Request")
        if not isinstance(request.file, File):
            raise TypeError(
                f"file is a {type(request.file).__name__}, not a File: open one with Engine.open"
            )


def _export(request: Request) -> Any:
    """The bytes of a request's buffer, locked in place until released."""
    try:
        _check_plain(request.buffer)
        return ffi.from_buffer("uint8_t[]", request.buffer, require_writable=request.kind == "read")
    except (TypeError, ValueError, BufferError) as error:
        wanted = "writable and C-contiguous" if request.kind == "read" else "C-contiguous"
        raise TypeError(
            f"cannot {request.kind} with a {type(request.buffer).__name__} ({error}): the buffer"
            f" must be {wanted}, without references to Python objects"
        ) from error


def _check_plain(buffer: "BufferLike") -> None:
    """TypeError for references to Python objects: their bytes mean something here and now alone,
    and a read would put others in their place, which ends the interpreter.
    """
    if isinstance(buffer, np.ndarray):  # which has dtypes that no format tells
        has_objects = buffer.dtype.hasobject
    else:
        with memoryview(buffer) as view:
            has_objects = "O" in _FIELD_NAME.sub("", view.format)
    if has_objects:
        raise TypeError("its elements are references to Python objects")


def _checked_offset(request: Request, nbytes: int) -> int:
    offset = check_int("offset", request.offset)
    if not 0 <= offset <= MAX_OFFSET - nbytes:
        raise ValueError(
            f"cannot {request.kind} {nbytes} bytes at offset {offset} of {request.file.path}:"
            " files have bytes 0 to 2**63 - 2"
        )
    return offset


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: what was submitted is still carried out."""
    _has_closed_all.set()
    for core in list(_live):
        core.close()
