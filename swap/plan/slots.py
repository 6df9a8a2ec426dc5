"""Where the components of a subgroup lie in a staging slot, and which go in one request: pure, no
I/O.

Components of a small subgroup are short, and a request costs the processors as much for 16 KiB as
for 4 MiB. So what lies side by side, in the slot as in the swap file, is transferred as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from swap.plan.layout import Component

MOST_BYTES = 8 * 1024 * 1024
"""Of several components in one request. A longer one spares nothing that matters, and components of
large subgroups are to be spread over the SSDs.
"""
_MOST_PLANS = 256
"""Subgroups of a model have few sizes."""


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes ``[start, stop)`` of a slot, which are those of component ``name``."""

    name: str
    dtype: torch.dtype
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """``places`` in their order, each from a page on. ``runs`` of them, with their sizes in bytes,
    may share a request.
    """

    places: tuple[Place, ...]
    runs: tuple[tuple[tuple[Place, ...], tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        return self.places[-1].stop


@lru_cache(maxsize=_MOST_PLANS)
def plan_slot(components: tuple[Component, ...], elements: int) -> SlotPlan:
    """The components of a subgroup of so many elements, one after the other."""
    places, used = [], 0
    for component in components:
        stop = used + component.nbytes(elements)
        places.append(Place(component.name, component.dtype, used, stop, stop - used))
        used = stop
    runs = tuple((run, tuple(place.nbytes for place in run)) for run in _runs(places))
    return SlotPlan(tuple(places), runs)


def _runs(places: list[Place]) -> Iterator[tuple[Place, ...]]:
    """As few runs of at most ``MOST_BYTES`` as there can be; no component is divided."""
    run: list[Place] = []
    for place in places:
        if run and place.stop - run[0].start > MOST_BYTES:
            yield tuple(run)
            run = []
        run.append(place)
    yield tuple(run)
