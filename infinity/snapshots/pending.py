"""A snapshot that is taken behind training, as its caller sees it."""

from __future__ import annotations

from checkpoint import PendingSave
from infinity.snapshots.entries import Point, Snapshot, told_of


class PendingSnapshot:
    """What ``offloaded.snapshot(name, block=False)`` returns: that snapshot on its way.

    Until it is durable it does not exist. An error is told once: by ``result()``, by the next call
    about snapshots that gives its ``name``, in the log when another save or snapshot begins, or by
    the end of the block, whichever comes first; what was only logged the end of the block raises.
    """

    def __init__(self, point: Point, save: PendingSave) -> None:
        self._point = point
        self._save = save

    @property
    def name(self) -> str:
        return self._point.name

    def done(self) -> bool:
        """Whether it has ended, in a durable snapshot or in an error. Never blocks."""
        return self._save.done()

    def staged(self) -> bool:
        """Whether the next step may begin at once: all of host memory that it holds has been read,
        or it has failed. Never blocks.
        """
        return self._save.staged()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until ``staged()``; False when that took longer than ``timeout`` seconds."""
        return self._save.wait_staged(timeout)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait until ``done()``, whatever comes of it; False when that took longer than ``timeout``
        seconds. Raises ``RuntimeError`` in a forked child, as ``result`` does.
        """
        return self._save.wait_done(timeout)

    def result(self, timeout: float | None = None) -> Snapshot:
        """Wait until it is durable, and older ones that it takes the place of are gone.

        Raises what ``offloaded.snapshot`` would have raised, and ``TimeoutError`` when it has not
        ended after ``timeout`` seconds; it goes on.
        """
        return told_of(self._point, self._save.result(timeout).file_nbytes)

    def tell(self) -> None:
        """Raise the error of one that has ended, where nobody knows of it."""
        if self._save.is_untold:
            self._save.tell()
