"""Which leaves keep bytes of their own, and which are views of another's: pure arithmetic.

Tensors over one storage come back over one storage, and no byte that one row-major leaf covers is
written twice. Three outcomes: a leaf is stored; it is a view of a stored leaf that covers it; or
several stored leaves are placed in one storage record, gaps between them closed.

Invariants: what a view refers to is stored; a view lies inside a row-major leaf, or is the twin of
a leaf of other strides, with its dtype and geometry; placements keep each byte's distance from a
64-byte boundary, so that what was aligned to its item size in memory is aligned in the record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint.format.slices import Shape, is_contiguous, span_elements

_ALIGNMENT = 64
_MAX_SPREAD = 4096
"""A storage this many times larger than what is stored of it is not kept together."""


@dataclass(frozen=True, slots=True)
class Region:
    """One leaf's place in memory: `key` tells storages apart, `offset` counts bytes in it.

    Leaves that read the same bytes as other values (conjugated, negated) have different keys.
    """

    key: object
    offset: int
    itemsize: int
    shape: Shape
    strides: Shape
    dtype: object = None

    @property
    def end(self) -> int:
        return self.offset + span_elements(self.shape, self.strides) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Stored:
    """The leaf has bytes of its own, at `offset` of shared storage `storage` if that is given."""

    storage: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The leaf begins `offset` bytes after the first byte of stored leaf `base`.

    A twin is all of its base, and is laid out as that is.
    """

    base: int
    offset: int
    is_twin: bool = False


@dataclass(frozen=True, slots=True)
class Aliasing:
    """The outcome per leaf, and the bytes of each storage that several stored leaves share."""

    places: tuple[Stored | View, ...]
    storages: tuple[int, ...]


def plan_aliasing(regions: Sequence[Region | None]) -> Aliasing:
    """Decides for every leaf; None stands for one that shares nothing by nature."""
    places: list[Stored | View] = [Stored()] * len(regions)
    storages: list[int] = []
    for members in _groups(regions):
        stored = _choose_views(members, places)
        if len(stored) > 1 and _place_together(stored, places, storages):
            continue
        for base in _bases_to_place(members, places):
            _place_together([base], places, storages)
    return Aliasing(tuple(places), tuple(storages))


_Member = tuple[int, Region]


def _groups(regions: Sequence[Region | None]) -> list[list[_Member]]:
    """Leaves by storage, where there is more than one; an empty tensor shares no byte."""
    groups: dict[object, list[_Member]] = defaultdict(list)
    for index, region in enumerate(regions):
        if region is not None and region.end > region.offset:
            groups[region.key].append((index, region))
    return [members for members in groups.values() if len(members) > 1]


def _choose_views(members: list[_Member], places: list[Stored | View]) -> list[_Member]:
    """Marks what another leaf covers as a view; gives the leaves that stay stored."""
    bases: list[_Member] = []
    twins: dict[Region, _Member] = {}
    for index, region in sorted(members, key=_row_major_first):
        base = _covering(region, bases)
        twin = twins.get(region)
        if base is not None:
            places[index] = View(base[0], region.offset - base[1].offset)
        elif twin is not None:
            places[index] = View(twin[0], 0, is_twin=True)
        elif region.is_contiguous:
            bases.append((index, region))
        else:
            twins[region] = (index, region)
    return sorted([*bases, *twins.values()], key=lambda member: member[0])


def _row_major_first(member: _Member) -> tuple[bool, int, int]:
    """Row-major leaves by offset, the longest first, so that a leaf follows what may cover it."""
    region = member[1]
    return not region.is_contiguous, region.offset, -region.end


def _covering(region: Region, bases: list[_Member]) -> _Member | None:
    """The base around a region. No base holds another, so that only the last to begin counts."""
    after = bisect_right(bases, region.offset, key=lambda base: base[1].offset)
    if after and region.end <= bases[after - 1][1].end:
        return bases[after - 1]
    return None


def _bases_to_place(members: list[_Member], places: list[Stored | View]) -> list[_Member]:
    """Leaves with a view that would be misaligned if they began at the beginning of memory."""
    uneven = set()
    for index, region in members:
        place = places[index]
        if isinstance(place, View) and place.offset % region.itemsize:
            uneven.add(place.base)
    return [member for member in members if member[0] in uneven]


def _place_together(
    stored: list[_Member], places: list[Stored | View], storages: list[int]
) -> bool:
    """Places leaves in a storage of their own; False, and nothing, if it were mostly gaps."""
    by_offset = sorted(stored, key=lambda member: member[1].offset)
    cursor, reached, shift = 0, -1, 0
    offsets: dict[int, int] = {}
    for index, region in by_offset:
        if region.offset >= reached:
            start = -(-cursor // _ALIGNMENT) * _ALIGNMENT + region.offset % _ALIGNMENT
            shift = start - region.offset
        offsets[index] = region.offset + shift
        reached = max(reached, region.end)
        cursor = reached + shift
    held = sum(region.itemsize * _count(region.shape) for _, region in stored)
    if cursor > _MAX_SPREAD * held:
        return False
    for index, offset in offsets.items():
        places[index] = Stored(len(storages), offset)
    storages.append(cursor)
    return True


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
