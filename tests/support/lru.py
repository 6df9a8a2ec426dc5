"""A policy that looks at past uses, where the library's own looks at next ones."""

from __future__ import annotations

from collections.abc import Iterable


class Lru:
    """What was not used for longest leaves; nothing does for what is not needed yet."""

    def __init__(self, *_: object) -> None:
        self._last: dict[int, int] = {}
        self._now = 0
        self.num_victims = 0

    def added(self, key: int) -> None:
        self.used(key)

    def used(self, key: int) -> None:
        self._now += 1
        self._last[key] = self._now

    def gone(self, key: int) -> None:
        del self._last[key]

    @property
    def num_known(self) -> int:
        return len(self._last)

    def victim(self, candidates: Iterable[int], *, ahead_for: int | None = None) -> int | None:
        if ahead_for is not None:
            return None
        found = min(candidates, key=self._last.__getitem__, default=None)
        self.num_victims += found is not None
        return found
