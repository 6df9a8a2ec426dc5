"""Which of the things that are kept in memory leaves when there is no room: pure, no I/O.

The rule is Belady's (1966): what is used farthest in the future leaves, and only for what is used
sooner. Where the future is known as far as a recorded order of uses goes (``schedule``), or by the
order in which a backward pass asks, no other rule makes fewer transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Distance = TypeVar("Distance", int, tuple[int, int])


class FarthestFirst(Generic[Key, Distance]):
    """``distance`` says how far in the future something is used next."""

    def __init__(self, distance: Callable[[Key], Distance]) -> None:
        self._distance: Callable[[Key], Distance] = distance

    def victim(
        self, candidates: Iterable[Key], *, sooner_than: Distance | None = None
    ) -> Key | None:
        """Which of the ``candidates`` leaves, of equal ones the first; None if there is none, or
        none is used later than ``sooner_than``, the distance of what wants the room.
        """
        found = max(candidates, key=self._distance, default=None)
        if found is None or sooner_than is None:
            return found
        return found if self._distance(found) > sooner_than else None
