"""What each thread is within: operations that have a coordinator and go on only when whatever has
broken into them on that thread has ended.

The handler of a signal runs on the main thread between any two of its steps, a finalizer on any
thread. What they call would wait for the coordinator for ever, without the limit of seconds that
meetings have.
"""

from __future__ import annotations

import threading
import weakref


class Within:
    """An operation of a thread with a coordinator, from before it waits for that until `ends`."""

    def __init__(self, ranks: object) -> None:
        self.ranks = ranks
        self.is_over = False

    def ends(self) -> None:
        """Idempotent."""
        self.is_over = True


class _Here(threading.local):
    def __init__(self) -> None:
        self.entered: list[weakref.ref[Within]] = []


_here = _Here()


def enter(ranks: object) -> Within:
    """This thread begins an operation. One that is let go of is over, too."""
    within = Within(ranks)
    _here.entered = [*_entered(), weakref.ref(within)]
    return within


def is_within(ranks: object) -> bool:
    """Whether this thread is within an operation with this coordinator."""
    return any((within := one()) is not None and within.ranks is ranks for one in _entered())


def _entered() -> list[weakref.ref[Within]]:
    """Those that are not over."""
    return [one for one in _here.entered if (within := one()) is not None and not within.is_over]
