"""Errors of operations that nobody asks for: of each file the first is logged.

Nothing runs when a failed operation is let go of, as that may be anywhere, and Python swallows an
interrupt that comes inside a finalizer. `tell` looks who has gone: wherever operations end or files
and engines come and go, and at exit.
"""

import atexit
import logging
import os
import weakref

from aio.process.threads import say

logger = logging.getLogger(__name__)


class FirstError:
    """The right to tell of the first error of a file, which one of those who could takes."""

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """True for whoever comes first."""
        try:
            return self._left.pop()
        except IndexError:
            return False


_failed: dict[weakref.ref[object], tuple[FirstError, OSError]] = {}
os.register_at_fork(after_in_child=_failed.clear)  # they are the parent's


def watch(ticket: object, first: FirstError, error: OSError) -> None:
    """`error` is to be told should `ticket` go before anybody has asked for it."""
    _failed[weakref.ref(ticket)] = first, error


def tell(*, at_exit: bool = False) -> None:
    """Logs errors that nobody can ask for any more; at exit, of all that are left."""
    for reference in list(_failed or ()):  # None in finalizers at the interpreter's end
        if at_exit or reference() is None:
            first, error = _failed.get(reference, (None, None))
            if first is not None and first.take():
                say(
                    logger.error,
                    "nobody asked for the result of an operation that failed: %s",
                    error,
                )
            _failed.pop(reference, None)


# Runs after what aio._core has registered, which is registered later: engines are closed by then.
atexit.register(tell, at_exit=True)
