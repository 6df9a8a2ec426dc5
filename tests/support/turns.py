"""Threads that go on one at a time, in an order that a seed decides.

Whatever Python code waits by is replaced: locks, queues, sleeps, the clock, and the starting of
threads. So a run is a function of its seed, as long as what it calls is. A thread gives its turn
away where it waits, where it lets go of a lock, and at lines of watched files, now and then.
Waiting with a timeout ends when nobody else can go on; where nobody can at all, ``DeadlockError``
tells where each of them stands.
"""

from __future__ import annotations

import _thread
import gc
import queue
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

_allocate = _thread.allocate_lock
_begin = _thread.start_new_thread
_here = threading.get_ident
_MOST_TIMEOUTS = 20_000


class DeadlockError(Exception):
    """No thread can go on."""


def _held_lock() -> Any:
    lock = _allocate()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class _Member:
    """A thread: it may go on when ``is_ready``, or at ``deadline``."""

    weight: float
    wake: Any = field(default_factory=_held_lock)
    is_ready: Callable[[], object] | None = None
    deadline: float | None = None


class Turns:
    """Decides who is next. ``switches`` counts how often that was another thread than before."""

    def __init__(
        self, seed: int, watched: tuple[str, ...], *, most_timeouts: int = _MOST_TIMEOUTS
    ) -> None:
        self.switches = 0
        self.now = 0.0
        self._random = random.Random(f"{seed} turns")
        # Some orders need a thread that stands still for long, others ones that alternate.
        self._chance = self._random.choice((0.003, 0.02, 0.1, 0.4))
        self._uneven = self._random.random() < 0.5
        self._left = self._gap()
        self._watched = watched
        self._members: dict[int, _Member] = {}
        self._coming: list[_Member] = []
        self._timeouts, self._most_timeouts = 0, most_timeouts
        self._deadlock: str | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """To this thread and those that it starts, which have ended at the end."""
        with ExitStack() as stack:
            for module, name, value in self._replacements():
                stack.enter_context(patch.object(module, name, value))
            stack.callback(gc.enable)
            gc.disable()  # when it runs, and what it ends, is no function of a seed
            self._members[_here()] = self._new_member()
            stack.callback(self._members.clear)
            sys.settrace(self._called)
            try:
                yield
            finally:
                sys.settrace(None)
                told = self._deadlock
                self._let_others_end()
            if self._deadlock is not told:
                raise DeadlockError(self._deadlock)

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        import aio.buffers
        import aio.process.threads
        import swap.device.visits
        import swap.update.stages

        clock = SimpleNamespace(
            monotonic=lambda: self.now if _here() in self._members else time.monotonic()
        )
        return [
            (_thread, "allocate_lock", self._lock),
            (threading, "_allocate_lock", self._lock),
            (threading, "Lock", self._lock),
            (threading, "RLock", partial(self._lock, again=True)),
            (threading, "_start_new_thread", self._start),
            (_thread, "start_new_thread", self._start),
            (threading.Thread, "join", self._joining(threading.Thread.join)),
            (queue, "SimpleQueue", partial(TurnQueue, self)),
            (aio.buffers, "SimpleQueue", partial(TurnQueue, self)),
            (aio.buffers, "time", clock),
            (aio.process.threads, "time", clock),
            (swap.device.visits, "time", clock),
            (swap.update.stages, "time", clock),
            (time, "sleep", partial(self._sleep, time.sleep)),
        ]

    # Threads.

    def _new_member(self) -> _Member:
        return _Member(self._random.choice((0.02, 1.0)) if self._uneven else 1.0)

    def _start(self, target: Callable[..., object], arguments: Any, *rest: Any) -> int:
        if _here() not in self._members:
            return _begin(target, arguments, *rest)
        member = self._new_member()
        self._coming.append(member)
        try:
            return _begin(self._run, (member, [target], [arguments]))
        finally:
            self.pass_on()

    def _run(self, member: _Member, target: list[Any], arguments: list[Any]) -> None:
        member.wake.acquire()
        self._coming.remove(member)
        self._members[_here()] = member
        sys.settrace(self._called)
        try:
            target.pop()(*arguments.pop())  # nothing here refers to it while or when it is done
        finally:
            sys.settrace(None)
            del self._members[_here()]
            if self._members or self._coming:
                self._chosen().wake.release()

    def _joining(self, really: Callable[..., None]) -> Callable[..., None]:
        def join(thread: threading.Thread, timeout: float | None = None) -> None:
            if _here() in self._members:
                self.wait(lambda: thread.ident not in self._members)
            really(thread, timeout)

        return join

    def _let_others_end(self) -> None:
        """Those that nobody joins, too. After a deadlock all of them end by its error."""
        me = self._members[_here()]
        while len(self._members) + len(self._coming) > 1:
            me.is_ready, me.deadline = lambda: len(self._members) + len(self._coming) == 1, None
            chosen = self._chosen()
            if chosen is not me:
                chosen.wake.release()
                me.wake.acquire()

    # Turns.

    def pass_on(self) -> None:
        """Let another thread go on, perhaps."""
        if _here() in self._members:
            self._wait(None, None)

    def wait(self, is_ready: Callable[[], object], timeout: float = -1) -> bool:
        """Until ``is_ready``; False when that took too long."""
        self._wait(is_ready, None if timeout < 0 else self.now + timeout)
        return bool(is_ready())

    def _wait(self, is_ready: Callable[[], object] | None, deadline: float | None) -> None:
        if self._deadlock is not None:
            raise DeadlockError(self._deadlock)
        me = self._members[_here()]
        me.is_ready, me.deadline = is_ready, deadline
        chosen = self._chosen()
        if chosen is not me:
            self.switches += 1
            chosen.wake.release()
            me.wake.acquire()
        me.is_ready = me.deadline = None
        if self._deadlock is not None:
            raise DeadlockError(self._deadlock)

    def _chosen(self) -> _Member:
        everyone = [*self._members.values(), *self._coming]
        ready = [one for one in everyone if one.is_ready is None or one.is_ready()]
        if ready:
            if self._uneven and self._random.random() < 0.02:
                for one in everyone:
                    one.weight = self._random.choice((0.02, 1.0))
            return self._random.choices(ready, [one.weight for one in ready])[0]
        waiting = [one for one in everyone if one.deadline is not None]
        self._timeouts += 1
        if not waiting or self._timeouts > self._most_timeouts:
            self._deadlock = self._told()
            for one in everyone:  # all of them end by the error
                one.is_ready, one.deadline = None, None
            return everyone[0]
        first = min(waiting, key=lambda one: one.deadline or 0.0)
        self.now = max(self.now, first.deadline or 0.0)
        return first

    def _told(self) -> str:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "no thread can go on:\n" + "\n".join(
            f"{names.get(ident)}:\n{''.join(traceback.format_stack(frames[ident])[-6:])}"
            for ident in self._members
        )

    # Lines.

    def _called(self, frame: FrameType, _: str, __: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._watched) else None

    def _line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                self._left = self._gap()
                self._wait(None, None)
        return self._line

    def _gap(self) -> int:
        """Lines until the next one that a turn may end at."""
        return 1 + int(self._random.expovariate(self._chance))

    # What is replaced.

    def _lock(self, again: bool = False) -> Any:
        if _here() not in self._members:
            return _REAL_AGAIN() if again else _allocate()
        return TurnLock(self, again=again)

    def _sleep(self, really: Callable[[float], None], seconds: float) -> None:
        if _here() not in self._members:
            return really(seconds)
        return self._wait(lambda: False, self.now + seconds)


_REAL_AGAIN = threading.RLock


class TurnLock:
    """A lock, or with ``again`` one that its owner may take again."""

    def __init__(self, turns: Turns, *, again: bool) -> None:
        self._turns, self._again = turns, again
        self._owner: dict[str, int] = {}
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _here()
        if self._again and self._owner.get("is") == me:
            self._count += 1
            return True
        while self._owner.setdefault("is", me) != me or (self._count and not self._again):
            if not blocking:
                return False
            if me not in self._turns._members:  # of others: really waits, while a member has it
                time.sleep(0.0005)
            elif not self._turns.wait(lambda: not self._owner, timeout):
                return False
        self._count = 1
        return True

    __enter__ = acquire

    def release(self) -> None:
        if not self._owner:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner.clear()
            if not self._turns._random.randrange(4):
                self._turns.pass_on()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._owner)

    def _is_owned(self) -> bool:
        return self._owner.get("is") == _here()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count

    def _at_fork_reinit(self) -> None:
        self._owner.clear()
        self._count = 0


class TurnQueue:
    """What ``queue.SimpleQueue`` is."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and not self._items:
            self._turns.wait(lambda: self._items, -1 if timeout is None else timeout)
        try:
            return self._items.popleft()
        except IndexError:
            raise queue.Empty from None

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)
