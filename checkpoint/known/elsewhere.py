"""Damage that other ranks know of: they read parts that this one does not, and one rank removes.

Each tells of it as it saves. What it does not tell of any more has been read since, and is sound,
or has been replaced. What this one knows of itself is in `damage`, and sound as soon as it has read
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

_told: list[tuple[Callable[[], object], frozenset[str]]] = []
"""By the coordinator that each save met by, the last time. Replaced as a whole, in one step."""


def note_told(ranks: object, saves: Iterable[str]) -> None:
    """What the other ranks of a coordinator know of now, by the ids of the damaged saves."""
    global _told
    others = [one for one in _told if one[0]() is not None and one[0]() is not ranks]
    _told = [*others, (_reference(ranks), frozenset(saves))]


def told_saves() -> set[str]:
    """The ids of all that ranks have told of, of coordinators that are there."""
    return {save for ranks, saves in _told if ranks() is not None for save in saves}


def _reference(ranks: object) -> Callable[[], object]:
    """A weak one, where the class of a coordinator allows for that."""
    try:
        return weakref.ref(ranks)
    except TypeError:
        return lambda: ranks
