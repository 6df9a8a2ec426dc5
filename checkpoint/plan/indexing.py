"""Which box of a tensor an index touches, and what of the box it picks: pure arithmetic.

Invariant: `values[index]` is `values[box][picks]`, for every index of integers, slices with steps
above zero and one `...`.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from types import EllipsisType
from typing import Any

from checkpoint.format.slices import Shape

Place = int | slice | EllipsisType
Index = Place | tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class IndexedBox:
    """The box of `shape` at `start`, and what is picked of each of its dimensions."""

    start: Shape
    shape: Shape
    picks: tuple[int | slice, ...]

    @property
    def skips(self) -> bool:
        """Whether elements of the box are left out."""
        return any(isinstance(pick, slice) and pick.step not in (None, 1) for pick in self.picks)


def indexed_box(shape: Shape, index: Index, name: str) -> IndexedBox:
    """The box that `index` touches of a tensor of `shape`; `name` is for errors.

    Raises IndexError for integers out of range and too many of them, TypeError for what is neither
    integer nor slice nor `...`, ValueError for steps below one.
    """
    starts, sizes, picks = [], [], []
    for axis, place in enumerate(_one_each(index, len(shape), name)):
        start, size, pick = _along(place, shape[axis], f"dimension {axis} of {name}")
        starts.append(start)
        sizes.append(size)
        picks.append(pick)
    return IndexedBox(tuple(starts), tuple(sizes), tuple(picks))


def _one_each(index: Index, count: int, name: str) -> list[Any]:
    """What is asked of each dimension: `...` and what is missing at the end are everything."""
    places = list(index) if isinstance(index, tuple) else [index]
    gaps = [number for number, place in enumerate(places) if place is ...]
    if len(gaps) > 1:
        raise IndexError(f"an index of {name} has more than one ...")
    missing = count - len(places) + len(gaps)
    if missing < 0:
        raise IndexError(
            f"{name} has {count} dimensions and is indexed by {len(places) - len(gaps)}"
        )
    gap = gaps[0] if gaps else len(places)
    return [*places[:gap], *[slice(None)] * missing, *places[gap + 1 :]]


def _along(place: Any, size: int, where: str) -> tuple[int, int, int | slice]:
    """First index and length of what is touched along a dimension, and what is picked of that."""
    if isinstance(place, slice):
        return _range(place, size, where)
    if isinstance(place, bool) or not isinstance(place, Integral):  # a tensor picks elements
        raise TypeError(
            f"{where} is indexed by a {type(place).__name__}; index by integers, slices and ..., "
            "and pick elements of the tensor that this gives"
        )
    number = int(place)
    if not -size <= number < size:
        raise IndexError(f"{number} is out of range for {where}, of size {size}")
    return number % size, 1, 0


def _range(place: slice, size: int, where: str) -> tuple[int, int, slice]:
    try:
        first, last, step = place.indices(size)
    except TypeError as error:
        raise TypeError(f"{where} is indexed by {place!r}, whose ends are no integers") from error
    except ValueError as error:  # a step of zero
        raise ValueError(f"{where} is indexed by {place!r}; give a step above zero") from error
    if step < 1:
        raise ValueError(
            f"{where} is indexed by {place!r}; give a step above zero, and flip what it gives"
        )
    count = len(range(first, last, step))
    touched = (count - 1) * step + 1 if count else 0
    return first, touched, slice(None, None, step if count > 1 else None)
