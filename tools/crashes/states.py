"""Chooses among the states that a disk may be in: all of them where they are few, else the likely
culprits and a sample.

Between two barriers (see `disk.Barrier`) what is certain does not change, so the states of all
moments in between are those of the last one: what is certain, and any subset of what is open.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

from crashes.disk import NEVER, History, Sectors, State, Write

_MAX_ALL = 8
"""Of so many open effects all subsets are tried."""
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_TORN = 0.2
"""How many of the writes in a sampled state are torn."""


@dataclass(frozen=True, slots=True)
class Window:
    """The moments up to a barrier. `certain` effects are on the disk, `open` ones may be."""

    certain: tuple[int, ...]
    open: tuple[int, ...]
    said: tuple[str, ...]


def windows(history: History) -> Iterator[Window]:
    """All moments of a history, those after its end too."""
    said: list[str] = []
    barriers = sorted(history.barriers, key=lambda barrier: barrier.moment)
    for moment, word in [*((one.moment, one.says) for one in barriers), (NEVER, "")]:
        begun = [n for n, effect in enumerate(history.effects) if effect.begin < moment]
        certain = tuple(n for n in begun if history.effects[n].synced < moment)
        yield Window(certain, tuple(n for n in begun if n not in set(certain)), tuple(said))
        said += [word] if word else []


def states(history: History, window: Window, count: int, seed: int) -> Iterator[State]:
    """At most `count` states of a window; where there are more, which is up to the seed."""
    rng = random.Random(seed)
    found: list[State] = [_state(window, chosen) for chosen in _chosen(window.open)]
    found += _torn(history, window, rng)
    if len(found) > count:
        found = rng.sample(found, count)
    yield from found
    if len(window.open) > _MAX_ALL:
        yield from islice(_sampled(history, window, rng), count - len(found))


def _state(window: Window, chosen: Sequence[int]) -> dict[int, Sectors | None]:
    return dict.fromkeys([*window.certain, *chosen])


def _chosen(open_: Sequence[int]) -> Iterator[Sequence[int]]:
    """Without tears: all subsets, or every prefix, each alone and each missing."""
    if len(open_) <= _MAX_ALL:
        yield from chain.from_iterable(combinations(open_, n) for n in range(len(open_) + 1))
        return
    for number, one in enumerate(open_):
        yield open_[:number]
        yield [one]
        yield [other for other in open_ if other != one]
    yield open_


def _torn(history: History, window: Window, rng: random.Random) -> Iterator[State]:
    """Each open write in pieces, among all that is open, and behind what came before it."""
    for number in window.open:
        effect = history.effects[number]
        if isinstance(effect, Write):
            before = [other for other in window.open if other < number]
            for others in (before, window.open):
                for sectors in _tears(effect, rng):
                    yield {**_state(window, others), number: sectors}


def _tears(write: Write, rng: random.Random) -> Iterator[Sectors]:
    """Nothing but the length, the beginning, the end, any sectors."""
    total = write.num_sectors
    some = rng.randrange(total) if total else 0
    yield frozenset()
    yield frozenset(range(some))
    yield frozenset(range(some, total))
    yield frozenset(sector for sector in range(total) if rng.random() < 0.5)


def _sampled(history: History, window: Window, rng: random.Random) -> Iterator[State]:
    while True:
        share = rng.choice(_SHARES)
        state = _state(window, [number for number in window.open if rng.random() < share])
        for number in window.open:
            effect = history.effects[number]
            if number in state and isinstance(effect, Write) and rng.random() < _TORN:
                state[number] = rng.choice(list(_tears(effect, rng)))
        yield state
