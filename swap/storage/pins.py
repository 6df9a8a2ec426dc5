"""What is kept after its user has let go of it, because others pinned it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Pins(Generic[K]):
    """How often each thing is pinned, and which of them nobody but pins keep. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[K, int] = {}
        self._unused: set[K] = set()

    def __contains__(self, thing: K) -> bool:
        return thing in self._counts

    def __iter__(self) -> Iterator[K]:
        return iter(self._counts)

    def pin(self, thing: K, *, is_used: bool = True) -> None:
        """Keep ``thing`` until it is unpinned as often. ``is_used``: whether it has a user, too,
        if it is pinned for the first time.
        """
        if thing not in self._counts and not is_used:
            self._unused.add(thing)
        self._counts[thing] = self._counts.get(thing, 0) + 1

    def unpin(self, thing: K) -> bool:
        """Undo one ``pin``; whether nothing keeps ``thing`` now."""
        self._counts[thing] -= 1
        if self._counts[thing]:
            return False
        del self._counts[thing]
        is_free = thing in self._unused
        self._unused.discard(thing)
        return is_free

    def let_go(self, thing: K) -> bool:
        """The user of ``thing`` needs it no more; whether nothing keeps it now."""
        if thing in self._counts:
            self._unused.add(thing)
            return False
        return True

    def use(self, thing: K) -> None:
        """A pinned thing has a user again."""
        assert thing in self._counts
        self._unused.discard(thing)
