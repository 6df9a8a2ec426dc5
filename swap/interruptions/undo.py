"""Undoing what a block did, completely, also when an interrupt comes in between; and closing what
nobody closed.

``contextlib.ExitStack`` takes an entry off its list and then calls it; ``Undo`` calls it first, so
an entry during or right after which an interrupt came is called again, and one that raised is once
more where that may be what a handler of a signal raised. Every entry can therefore be called twice,
and the second call does what the first has left.

What is let go of goes anywhere: on any thread, at any line, with any lock held, in the place of a
signal's handler. Closing takes locks and waits for threads. So C starts a thread there, which
closes, and nothing else runs: ``Closing``.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from aio.errors import let_go, may_be_of_a_handler, may_be_repeated

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Kind: TypeAlias = "type[BaseException] | None"
Leave: TypeAlias = "Callable[[Kind, BaseException | None, TracebackType | None], object]"
_MAX_CALLS = 100
"""Of one entry: an interrupt that comes each time does not come from outside."""


class Undo:
    """Entries that are called when the block ends, the last one first, each with the error that is
    on its way: that which ends the block, or the last that an entry raised.

    When all have been called, that of an entry is raised, or else an interrupt that came between.
    Entries cannot keep an error from being raised.
    """

    def __init__(self) -> None:
        self._entries: list[Leave] = []
        self._failure: BaseException | None = None
        self._interrupt: BaseException | None = None

    def push(self, leave: Leave) -> None:
        """``leave`` is called as ``__exit__`` is; what it returns does not matter."""
        self._entries.append(leave)

    def tell(self, told: Callable[[BaseException | None], object]) -> None:
        """``told`` is called with the error that is on its way, if that is not an interrupt that
        came since the block began to end: what it came into is finished.
        """
        self.push(lambda _kind, error, _: told(None if error is self._interrupt else error))

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        self._entries.append(lambda *_: function(*arguments))

    def enter_context(self, manager: AbstractContextManager[T]) -> T:
        """Its ``__exit__`` is called also where ``__enter__`` raised or did not begin."""
        self._entries.append(manager.__exit__)
        return manager.__enter__()

    def forget(self) -> None:
        """There is nothing to undo any more."""
        self._entries.clear()

    def close(self) -> None:
        """End the block. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: Kind, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(error)
        finally:
            for _ in range(_MAX_CALLS):
                try:
                    self._run(error)  # the rest, if an interrupt came between two entries
                    break
                except BaseException as interrupt:  # another one
                    self._interrupt = self._interrupt or let_go(interrupt)
            self._tell()

    def _run(self, cause: BaseException | None) -> None:
        calls, times, before = 0, 0, self._failure
        first: BaseException | None = None
        while self._entries:
            now = before or cause or self._interrupt
            calls += 1
            try:
                self._entries[-1](*_details(now))
            except Exception as failure:  # of whatever kind: the rest is to be undone still
                # Kept at once: it may come this once, and an interrupt at the next step.
                self._failure = behind(told_of(first, let_go(failure)), now)
                if may_be_repeated(failure, times):
                    times, first = times + 1, first or self._failure
                    continue
            except BaseException as interrupt:
                self._interrupt = self._interrupt or let_go(interrupt)
                if calls < _MAX_CALLS:
                    continue
            self._entries.pop()
            calls, times, first, before = 0, 0, None, self._failure

    def _tell(self) -> None:
        """An error is told when it is on its way; one that an interrupt kept back is told later."""
        told = self._failure or self._interrupt
        if told is None:
            return
        if self._failure is not None and self._interrupt is not None:
            behind(self._failure, self._interrupt)
        context = told.__context__
        try:
            raise told
        finally:
            told.__context__ = context  # ``raise`` has set what is being handled here
            self._failure = self._interrupt = None
            del told  # its traceback leads to this frame


def told_of(first: BaseException | None, again: BaseException) -> BaseException:
    """Of what a call and, if there was a ``first``, its repetition raised: the first, unless the
    other is surely of the call itself. That is told then, with the first behind it.
    """
    if first is not None and may_be_of_a_handler(again):
        return first
    return behind(again, first)


def _details(
    error: BaseException | None,
) -> tuple[Kind, BaseException | None, TracebackType | None]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def behind(error: E, before: BaseException | None) -> E:
    """``error``, with ``before`` as the last of what it came after."""
    if before is not None:
        older = _chain(before)
        newer = [one for one in _chain(error) if one not in older]
        if newer:
            newer[-1].__context__ = before
    return error


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (context := chain[-1].__context__) is not None and context not in chain:
        chain.append(context)
    return chain


class Closing:
    """Calls ``close``, which does not refer to ``owner``: by ``now``, or when ``owner`` is gone, or
    as the interpreter ends. What has been closed by ``now`` without an error is not closed again.
    In a forked child nothing is: it is the parent's.
    """

    def __init__(self, owner: object, close: Callable[[], object]) -> None:
        self.is_done = False
        self._close = close
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._owner = weakref.ref(owner)
        self._when_gone: weakref.finalize[..., Any] | None = None
        # Others find it from here on: an interrupt below leaves something whole.
        _left.add(self)
        self._when_gone = weakref.finalize(owner, _thread.start_new_thread, self.now, ())
        self._when_gone.atexit = False

    @property
    def is_due(self) -> bool:
        """Whether the owner is gone."""
        return self._owner() is None

    def now(self) -> None:
        """Closes, and waits for another thread that does. Idempotent."""
        if os.getpid() == self._process:
            with self._turn:
                if not self.is_done:
                    self._close()
                self.is_done = True
        if self._when_gone is not None:
            self._when_gone.detach()
        _left.discard(self)


_left: set[Closing] = set()


def close_gone() -> None:
    """Closes that of which the owner is gone, unless another thread has; waits for that. All are
    tried, whatever one of them raises; then that is raised, and it is left for the next call.
    """
    _close(closing for closing in list(_left) if closing.is_due)


@atexit.register
def _close_all() -> None:
    _close(list(_left))


def _close(closings: Iterable[Closing]) -> None:
    with Undo() as undo:
        for closing in closings:
            undo.callback(closing.now)
