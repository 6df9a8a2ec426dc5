"""Children forked from a process that holds state: they have its memory as it was and none of its
threads, so a wait for those threads would never end.

A child may use everything of its own; what belongs to the parent is refused at its first use. It
keeps none of the parent's locks: descriptors of swap directories are closed right after the fork.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """What a forked child has to let go of."""

    def after_fork(self) -> None:
        """In the child, before anything else runs. Takes no locks: they might never be released."""


_known: weakref.WeakSet[Inherited] = weakref.WeakSet()


def note(thing: Inherited) -> None:
    """Have ``thing`` told in children forked from now on, for as long as it lives."""
    _known.add(thing)


def check_process(process: int, what: str) -> None:
    """Raises ``RuntimeError`` naming both processes in one that was forked from ``process``."""
    here = os.getpid()
    if here != process:
        raise RuntimeError(
            f"{what} of process {process} cannot be used in process {here}, which was forked from "
            "it: the threads and files that it works with are the other's. Use it there (workers "
            "of a DataLoader should be given tensors, not the model), or copy values with "
            "offloaded.export(folder) first"
        )


def _after_fork() -> None:
    for thing in list(_known):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)
