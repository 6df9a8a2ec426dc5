"""Agreement between the ranks of one save. One process agrees with itself."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Coordinator(Protocol):
    """What a save needs of its process group. Every rank makes the same calls in the same order.

    With several ranks values are JSON values.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def begin(self) -> None:
        """Waits until nothing else of this process uses the coordinator; `end` must follow, on any
        thread.
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

    def begin(self) -> None:
        """Saves of one process need not wait for each other."""

    def end(self) -> None:
        """See `begin`."""

    def broadcast(self, value: T) -> T:
        return value

    def exchange(self, value: T | BaseException) -> list[T]:
        if isinstance(value, BaseException):
            raise value
        return [value]
