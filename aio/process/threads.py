"""Threads and what is waited for, also where an interrupt comes; and logging on them.

A signal handler runs on the main thread between two of its steps, and what it raises may come into
`threading.Thread.start` or `join`: the first leaves half a thread, and the second (before Python
3.13) takes one that still runs for ended. So a thread is started by another, which has no
handlers, and its end is told by what it does last.
"""

import _thread
import contextlib
import errno
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from sys import is_finalizing
from types import MethodType
from typing import Any, TypeVar

from aio._native import lib
from aio.errors import AioError
from aio.process.within import entered, take_over

T = TypeVar("T")
_AT_ITS_END = "can't create new thread at interpreter shutdown"
_REFUSALS = (("can't start new thread",), (_AT_ITS_END,))
"""What Python says where the system gives no thread, as arguments of a RuntimeError."""
NO_MORE_THREADS = (
    "the process or its user has as many threads as it may have, or no address space for the stack"
    " of one more: raise RLIMIT_NPROC (ulimit -u), pids.max of its cgroup or RLIMIT_AS (ulimit -v)"
)
"""Why the system gives no thread, which it does not tell, and what to do about it."""
_NONE_AT_THE_END = (
    "the interpreter has ended but for finalizers, beside which no thread runs: do this before, in"
    " a `with` block, a `finally` or a handler of `atexit`"
)
_MAX_FAILURES = 100
"""In a row, of turns for which it need not be memory that lacks."""
_wait_for_memory = lib.aio_wait_for_memory  # looked up here, as that takes memory
LOOK_SECONDS = 1.0
"""How often those who wait look by themselves: an interrupt may keep them from being told."""


class Changes:
    """Tells those who wait that what they look at, under a lock, has changed.

    What threading.Condition does, for a lock that nobody holds while he waits: an interrupt between
    its letting go of a lock and its taking it again leaves the `with` over it with a RuntimeError.
    """

    def __init__(self) -> None:
        self._change = Latch()

    def next(self) -> "Latch":
        """Is set by the next `tell`. To be asked for with the lock held, and waited for without, at
        most LOOK_SECONDS at a time: an interrupt may come between a change and its `tell`.
        """
        if self._change.is_set():
            self._change = Latch()
        return self._change

    def tell(self) -> None:
        """With the lock held."""
        self._change.set()


class Latch:
    """Is set once and stays so; any number of threads wait for it.

    What threading.Event does, without its lock: that stays locked if an interrupt meets a waiting
    main thread in the wrong place, and then nobody can set the event any more.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[_thread.LockType] = []  # held; released to wake one thread each

    def set(self) -> None:
        """May be repeated after an interrupt. Those that it has not woken then look by themselves,
        within LOOK_SECONDS.
        """
        self._is_set = True
        for waiter in list(self._waiters):  # each takes itself off the list
            with contextlib.suppress(RuntimeError):  # it was woken before
                waiter.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, after at most `timeout` seconds."""
        if not self._is_set and (timeout is None or timeout > 0):
            waiter = _thread.allocate_lock()
            waiter.acquire()
            self._waiters.append(waiter)
            self._wait_with(waiter, None if timeout is None else time.monotonic() + timeout)
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_set

    def _wait_with(self, waiter: "_thread.LockType", deadline: float | None) -> None:
        seconds = LOOK_SECONDS
        while not self._is_set and seconds > 0:  # `set` looks at the list after this is true
            if deadline is not None:
                seconds = min(LOOK_SECONDS, deadline - time.monotonic())
            if waiter.acquire(timeout=max(seconds, 0)):
                return


class _Start(threading.Event):
    """What `threading.Thread.start` waits for, without end: here as long as the thread lives."""

    def __init__(self, has_died: Callable[[], bool], name: str) -> None:
        super().__init__()
        self._has_died, self._name = has_died, name

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(LOOK_SECONDS if timeout is None else timeout):
            if timeout is not None:
                return False
            if self._has_died() and not self.is_set():
                raise _died(self._name)
        return True


class WatchedThread(threading.Thread):
    """A thread whose `start` returns when it runs, and raises MemoryError where it ended before.

    The system gives a thread, and Python finds no memory for its first step: it ends with a line on
    stderr, and whoever waits for what it was to set waits for ever. What is called in it is let go
    of at its end, and is known by that. Where `threading` calls something else one day, it waits.

    It runs from where its target calls `begun`, if that `tells`: others rely on it from there on.
    Else it runs from one step before its target, and may end between the two. It is `within` what
    the thread is within that makes it.
    """

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        *,
        daemon: bool = False,
        tells: bool = False,
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=daemon)
        self.has_begun = Latch()
        self._tells = tells
        self._within = entered()
        self._called: list[weakref.ref[object]] = []
        self._started = _Start(partial(_are_gone, self._called), name)

    @property
    def _bootstrap(self) -> Callable[[], None]:
        bound: Callable[[], None] = MethodType(_BOOTSTRAP, self)
        self._called[:] = [weakref.ref(bound)]
        return bound

    def start(self) -> None:
        """Raises RuntimeError if there is no thread to be had, and MemoryError."""
        _check_not_ended()
        try:
            super().start()
            wait_while(self.has_begun, lambda: not self.has_died(), self.name)
        except MemoryError:
            getattr(threading, "_limbo", {}).pop(self, None)  # it is no thread that is to come
            raise

    def run(self) -> None:
        take_over(self._within)
        if not self._tells:
            self.has_begun.set()
        super().run()

    def take_turns(self, turn: Callable[[], bool]) -> None:
        """What its target does that others wait for: tells that it has begun, and does `turn` until
        that returns False. Where there is no memory for a turn, which may be repeated, it is done
        again when there is some. Raises what is no such error and comes at every turn.
        """
        num_failures = 0
        is_short = False
        while True:
            # All that is called is called in here: where there is no memory, calls raise.
            try:
                if is_short:
                    _wait_for_memory()
                    is_short = False
                if not self.has_begun.is_set():
                    self.has_begun.set()
                if not turn():
                    return
                num_failures = 0
            except MemoryError:
                is_short = True
            except Exception:  # where Python itself has no memory, it may say something else
                is_short = True
                num_failures += 1
                if num_failures > _MAX_FAILURES:
                    raise

    def has_died(self) -> bool:
        """Whether it was started and has ended, in whatever way."""
        return _are_gone(self._called)


_BOOTSTRAP: Callable[..., Any] = vars(threading.Thread).get("_bootstrap", threading.Thread.run)
"""What `threading` has the new thread call."""


def begun() -> None:
    """Of a target that tells: whatever comes from here on, others are told of its end. May be
    repeated where there was no memory.
    """
    thread = threading.current_thread()
    if isinstance(thread, WatchedThread):
        thread.has_begun.set()


def take_turns(turn: Callable[[], bool]) -> None:
    """As `WatchedThread.take_turns` of the one that this is."""
    thread = threading.current_thread()
    assert isinstance(thread, WatchedThread)
    thread.take_turns(turn)


def surely(action: Callable[[], T]) -> T:
    """Does what has to be done, and may be repeated: where there is no memory, again in a moment,
    for about a second.
    """
    num_failures = 0
    while True:
        try:
            return action()
        except MemoryError:
            num_failures += 1
            if num_failures > _MAX_FAILURES:
                raise
            _wait_for_memory()


def _are_gone(called: Sequence[weakref.ref[object]]) -> bool:
    return bool(called) and called[0]() is None


def wait_while(latch: Latch, is_alive: Callable[[], bool], name: str) -> None:
    """Waits for a latch that thread `name` sets. Raises MemoryError where it ended without."""
    while not latch.wait(LOOK_SECONDS):
        if not is_alive() and not latch.is_set():
            raise _died(name)


def _died(name: str) -> MemoryError:
    return MemoryError(
        f"the thread {name} had no memory to begin with and has ended: raise the limit of the"
        " process (RLIMIT_AS, `ulimit -v`; vm.overcommit_memory=2 counts all of the machine), or"
        " use less memory"
    )


class Thread(WatchedThread):
    """For `start_thread` and `join_thread`. The interpreter does not wait for it at its end."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        *,
        tells: bool = False,
    ) -> None:
        super().__init__(target, name, args, daemon=True, tells=tells)
        self._claim: dict[str, str] = {}
        self.has_ended = Latch()

    def run(self) -> None:
        if not self.claimed_for("work"):
            self.has_begun.set()
            return
        try:
            super().run()
        finally:
            self.has_ended.set()

    def claimed_for(self, what: str) -> bool:
        """Whether it is to do this: what comes first, "work" or "nothing", for ever."""
        return self._claim.setdefault("what", what) == what


def start_apart(thread: WatchedThread) -> None:
    """Starts a thread from another one, which has no handlers; that is one step of this thread.

    Raises RuntimeError if there is no thread to be had (see `is_refusal`), and MemoryError as
    `WatchedThread.start`.
    """
    _check_not_ended()
    is_launched = Latch()
    refusals: list[BaseException] = []

    def launch(_: object) -> None:
        try:
            thread.start()
        except BaseException as error:
            refusals.append(error)
        is_launched.set()

    held = _thread.allocate_lock()
    launcher = weakref.ref(held)  # it is gone when the thread that holds it is
    _thread.start_new_thread(launch, (held,))
    del held
    wait_while(is_launched, lambda: launcher() is not None, thread.name)
    if refusals:
        raise refusals.pop()


def _check_not_ended() -> None:
    """Raises RuntimeError where a thread would never run, as Python does itself from 3.12 on."""
    if is_finalizing():
        raise RuntimeError(_AT_ITS_END)


def why_no_thread() -> str:
    """Of a refusal: why there is none, and what to do about it."""
    return _NONE_AT_THE_END if is_finalizing() else NO_MORE_THREADS


def is_refusal(error: RuntimeError) -> bool:
    """Whether there was no thread to be had. Any other is raised by the handler of a signal, which
    came while the main thread waited for the new one to begin.
    """
    return error.args in _REFUSALS


def start_thread(thread: Thread) -> None:
    """Starts `thread`, which its owner has recorded already, and returns when it runs.

    So an interrupt while it starts leaves its owner able to end it, whether or not it runs. Raises
    AioError (EAGAIN) when the process may have no more threads, and MemoryError where the new one
    finds no memory to begin with; nothing runs then.
    """
    try:
        start_apart(thread)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        raise AioError(
            f"cannot start the thread {thread.name}: {error}; {why_no_thread()}"
            f"{'' if is_finalizing() else ', or use fewer workers'}",
            errno=errno.EAGAIN,
        ) from error


def join_thread(thread: Thread) -> None:
    """Waits for the end of `thread`; one that has not begun never will.

    Called again after an interrupt, it waits again.
    """
    if not thread.claimed_for("nothing"):
        while not thread.has_ended.wait(LOOK_SECONDS) and not thread.has_died():
            continue
        threading.Thread.join(thread)


def is_main_thread() -> bool:
    """Where handlers of signals run, for which no other thread waits."""
    return threading.current_thread() is threading.main_thread()


def say(log: Callable[..., None], *args: object) -> None:
    """Logs on a thread that others wait for, which must not end with a logging handler.

    What a handler or a filter raises goes to `threading.excepthook`, which prints it; on the main
    thread, for which nobody waits, it is raised as usual.
    """
    try:
        log(*args)
    except BaseException as error:
        thread = threading.current_thread()
        if is_main_thread():
            raise
        with contextlib.suppress(BaseException):  # the hook is the program's own as well
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
            )
