"""One call at a time of objects that read or write themselves.

Stripes, copies and loads run on several threads, and an object that seeks and then reads one file
would get the bytes of another thread's place. So calls of one object take turns, over all saves and
loads of the process, unless it says that it needs none: `thread_safe = True`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

Transfer = Callable[[int, memoryview], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Turn:
    """Of one object, which lives as long as this does: its id is its own."""

    owner: object
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Turns:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child no thread is left that would end a turn."""
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[int, _Turn] = WeakValueDictionary()

    def of(self, owner: object) -> _Turn:
        with self._lock:
            turn = self._turns.get(id(owner))
            if turn is None:
                turn = self._turns[id(owner)] = _Turn(owner)
            return turn


_turns = _Turns()
os.register_at_fork(after_in_child=_turns.forget)


def in_turn(owner: object, transfer: Transfer) -> Transfer:
    """A method of an object that moves bytes, called by one thread at a time."""
    if getattr(owner, "thread_safe", False) is True:
        return transfer
    turn = _turns.of(owner)

    def call(start: int, data: memoryview) -> None:
        with turn.lock:
            transfer(start, data)

    return call
