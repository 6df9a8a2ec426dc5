"""Agreement between the ranks of one save. One process agrees with itself."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Operation(enum.IntEnum):
    """What ranks meet for. One that does something else is told so, whatever the points are."""

    COMPARE = 0
    SAVE = 101
    LOAD = 102
    STEPS = 103
    LATEST = 104
    OWN = 105


def doing(kind: int) -> str | None:
    """What a rank does at a point of this kind, for messages; None for what is no operation."""
    return _DOING.get(kind)


_DOING: dict[int, str] = {
    Operation.COMPARE: "compares notes",
    Operation.SAVE: "saves a checkpoint",
    Operation.LOAD: "loads a checkpoint",
    Operation.STEPS: "asks for the steps that can be loaded",
    Operation.LATEST: "asks for the latest step",
    Operation.OWN: "compares what each rank has for itself",
}


class Coordinator(Protocol):
    """What a save needs of its process group. Every rank makes the same calls in the same order.

    With several ranks values are JSON values.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def begin(self, operation: Operation = Operation.COMPARE) -> None:
        """Waits until nothing else of this process uses the coordinator; `end` must follow, on any
        thread. Ranks that meet for another `operation` all raise.
        """
        ...

    def end(self) -> None:
        """Lets the next one use it."""
        ...

    def broadcast(self, value: T) -> T:
        """Gives every rank the value of rank 0."""
        ...

    def exchange(self, value: T | BaseException) -> list[T]:
        """Gives every rank the values of all, by rank.

        If any rank's value is an exception, every rank raises: its own, or one that names the rank.
        """
        ...


class SingleProcess:
    """The coordinator of a save by one process alone."""

    rank = 0
    world_size = 1

    def begin(self, operation: Operation = Operation.COMPARE) -> None:
        """Saves of one process need not wait for each other."""

    def end(self) -> None:
        """See `begin`."""

    def broadcast(self, value: T) -> T:
        return value

    def exchange(self, value: T | BaseException) -> list[T]:
        if isinstance(value, BaseException):
            raise value
        return [value]


def unaccompanied(ranks: Coordinator, operation: Operation, step: Callable[[], T]) -> T:
    """Takes a step that comes before the first meeting of an operation. If it fails, so does the
    operation, on every rank: there that is what this one brings to the meeting.
    """
    try:
        return step()
    except Exception as error:
        tell(ranks, operation, error)
        raise


def tell(ranks: Coordinator, operation: Operation, error: BaseException) -> None:
    """Brings an error to the first meeting of an operation, and raises it."""
    ranks.begin(operation)
    try:
        ranks.exchange(error)
    finally:
        ranks.end()
