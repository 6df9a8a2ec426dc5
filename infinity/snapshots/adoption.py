"""Extents of a snapshot in the state of now: pinned for as long as the snapshot is there, and taken
in place of copies where the state is cut as it was.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence

from aio import AioError
from infinity.snapshots.entries import Entry
from swap.plan.layout import Component
from swap.snapshots.contents import Contents, FileRange
from swap.snapshots.folders import Folders, check_length
from swap.storage.extents import Extent
from swap.tiered import TieredState
from swap.tiers import Tier

Cut = tuple[tuple[str, int, int, int], ...]
"""Of a subgroup: the segments of parameters, by name, first element, elements, and offset."""


def pin_known(state: TieredState, folders: Folders, entries: Iterable[Entry]) -> None:
    """Open the swap files that snapshots need, and pin what they have in them. A file that is
    missing is left out: who needs it is told.
    """
    if state.extents is None:
        return
    for entry in entries:
        files = {part.file for parts in entry.contents.ranges.values() for part in parts}
        for name in sorted(files):
            place = folders.file(name)
            if name not in state.extents.names and place is not None:
                number, path = place
                state.extents.adopt(name, path, number)
        for parts in entry.contents.ranges.values():
            extent = extent_of(parts, state.extents.names)
            if extent is not None:
                state.extents.pin([extent], are_used=False)
                entry.pinned.append(extent)


def extent_of(parts: Sequence[FileRange], names: Sequence[str]) -> Extent | None:
    """The extent that consists of ``parts``; None where one of their files is not open."""
    if not all(part.file in names for part in parts):
        return None
    pieces = [Extent(names.index(part.file), part.offset, part.nbytes) for part in parts]
    if len(pieces) == 1:
        return pieces[0]
    total = sum(piece.nbytes for piece in pieces)
    return Extent(pieces[0].directory, pieces[0].offset, total, tuple(pieces))


def check_files(folders: Folders, entry: Entry) -> None:
    """Raises ``AioError`` naming a swap file that a snapshot needs, and that is not there or too
    short.
    """
    by_file: dict[str, list[FileRange]] = {}
    for parts in entry.contents.ranges.values():
        for part in parts:
            by_file.setdefault(part.file, []).append(part)
    for name, ranges in by_file.items():
        place = folders.file(name)
        if place is None:
            raise AioError(
                f"the snapshot {entry.point.name} has a part of the state in the file {name}.swap, "
                "which is in none of the nvme directories: give all that it was taken with",
                errno=errno.ENOENT,
                filename=f"{name}.swap",
            )
        check_length(place[1], ranges)


def alike(state: TieredState, contents: Contents) -> dict[int, int]:
    """The subgroups that are on NVMe, now and in a snapshot, with the same parts of parameters and
    the same components: by their number of now, that in the snapshot. Whole units only.
    """
    names = [name for name, _ in contents.parameters]
    saved: dict[Cut, int] = {
        tuple((names[s.parameter], s.start, s.length, s.offset) for s in group.segments): number
        for number, group in enumerate(contents.groups)
        if not group.is_host
    }
    specs = state.layout.specs
    found: dict[int, int] = {}
    for unit in state.layout.units:
        numbers = range(unit.first, unit.first + unit.num_subgroups)
        matches: dict[int, int] = {}
        for number in numbers:
            group = state.layout.subgroups[number]
            cut = tuple(
                (specs[s.parameter].name, s.start, s.length, s.offset) for s in group.segments
            )
            other = saved.get(cut)
            if other is not None and _same(state, number, contents, other):
                matches[number] = other
        if len(matches) == len(numbers):
            found |= matches
    return found


def _same(state: TieredState, number: int, contents: Contents, other: int) -> bool:
    here: tuple[Component, ...] = tuple(
        state.components.component(number, name) for name in state.components.names(number)
    )
    there = contents.groups[other]
    is_nvme = state.placement.state_home[number] is Tier.NVME
    return (
        is_nvme and here == there.components and state.layout.subgroups[number].numel == there.numel
    )


def adopt(state: TieredState, contents: Contents, groups: Mapping[int, int]) -> set[int]:
    """Let the extents of a snapshot, which are pinned, be the state of these subgroups; returns
    the parameters that this is all of.
    """
    assert state.extents is not None
    names = state.extents.names
    for number, other in groups.items():
        for component in contents.groups[other].components:
            parts = contents.ranges.get((other, component.name))
            extent = None if parts is None else extent_of(parts, names)
            assert parts is None or extent is not None
            state.components.adopt(number, component.name, extent)
    state.num_changes += 1
    segments = (s for number in groups for s in state.layout.subgroups[number].segments)
    return {segment.parameter for segment in segments}
