"""What each thread is within: operations that have something for themselves, and go on only when
whatever has broken into them on that thread, or is called by them, has ended.

The handler of a signal runs on the main thread between any two of its steps, a finalizer on any
thread; what a program has given to be read from or written to is called on threads that the
operation has started. What they call would wait for ever for what the operation has.

Invariant: a thread is within what the one was within that made it.
"""

from __future__ import annotations

import threading
import weakref


class Within:
    """An operation that has something, from before it waits for that until `ends`."""

    def __init__(self, has: object) -> None:
        self.has = has
        self.is_over = False

    def ends(self) -> None:
        """Idempotent."""
        self.is_over = True


Entered = list[weakref.ref[Within]]


class _Here(threading.local):
    def __init__(self) -> None:
        self.entered: Entered = []


_here = _Here()


def enter(has: object) -> Within:
    """This thread begins an operation. One that is let go of is over, too."""
    within = Within(has)
    _here.entered = [*entered(), weakref.ref(within)]
    return within


def is_within(has: object) -> bool:
    """Whether this thread is within an operation that has this."""
    return any((within := one()) is not None and within.has is has for one in entered())


def entered() -> Entered:
    """The operations of this thread that are not over, for a thread that it makes."""
    return [one for one in _here.entered if (within := one()) is not None and not within.is_over]


def take_over(found: Entered) -> None:
    """This thread, which begins, was made within these."""
    _here.entered = found
