"""Which of the things that are kept in memory leaves when there is no room: pure, no I/O.

The stores (of weights, of gathered weights, of saved tensors) know their things by numbers. They
tell a ``Policy`` what is used, and ask it who leaves and whether something that is not needed yet
may take the place. Another policy is another class here, made by ``for_weights`` or ``for_saved``.

The rule is Belady's (1966): what is used farthest in the future leaves, and only for what is used
sooner. Where the future is known as far as a recorded order of uses goes (``schedule``), or by the
order in which a backward pass asks, no other rule makes fewer transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from swap.plan.schedule import Schedule


class Policy(Protocol):
    """Not thread-safe: the store serialises. Over several ranks the calls are the same on all of
    them, and so must be the answers.
    """

    def added(self, key: int) -> None:
        """It is in memory, or will be, for a use to come."""

    def used(self, key: int) -> None:
        """It is used now."""

    def gone(self, key: int) -> None:
        """It is no more, and its number does not come again. (Weights come again.)"""

    def victim(self, candidates: Iterable[int], *, ahead_for: int | None = None) -> int | None:
        """Which of the ``candidates`` leaves; None if there is none, or if none is worth less than
        ``ahead_for``, which is not needed yet. Without that, something has to leave.
        """


def for_weights(schedule: Schedule) -> Policy:
    """The policy for weights, whose uses ``schedule`` records. It is told of each use first."""
    return FarthestFirst(schedule.distance)


def for_saved() -> Policy:
    """The policy for saved tensors, which are numbered in the order in which they are saved."""
    return BackwardOrder()


class FarthestFirst(Policy):
    """``distance`` says how far in the future something is used next: numbers, or what else has an
    order.
    """

    def __init__(self, distance: Callable[[int], Any]) -> None:
        self._distance = distance

    def added(self, key: int) -> None:
        """What was says nothing of what comes."""

    def used(self, key: int) -> None:
        """So here."""

    def gone(self, key: int) -> None:
        """So here."""

    def victim(self, candidates: Iterable[int], *, ahead_for: int | None = None) -> int | None:
        """Of equal ones the first."""
        found = max(candidates, key=self._distance, default=None)
        if found is None or ahead_for is None:
            return found
        return found if self._distance(found) > self._distance(ahead_for) else None


class BackwardOrder(FarthestFirst):
    """A backward pass asks for what was saved in the opposite order: below the current one, the
    older the farther; those above it were used already.
    """

    def __init__(self) -> None:
        super().__init__(self._ahead)
        self._current = 0

    def added(self, key: int) -> None:
        self._current = max(self._current, key)

    def used(self, key: int) -> None:
        self._current = key

    def _ahead(self, key: int) -> tuple[int, int]:
        return key > self._current, abs(key - self._current)
