"""Extents of a snapshot in the state of now: pinned for as long as the snapshot is there, and taken
in place of copies where the state is cut as it was.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from aio import AioError
from infinity.snapshots.entries import Entry, read_sums
from infinity.values.load_targets import names_of
from swap.plan.layout import Component
from swap.snapshots.contents import Contents, FileRange
from swap.snapshots.folders import Folders, check_length
from swap.storage.arrays import Arrays
from swap.storage.extents import Extent, ExtentStore
from swap.tiered import TieredState

_log = logging.getLogger(__name__)
Cut = tuple[tuple[str, int, int, int], ...]
"""Of a subgroup: the segments of parameters, by name, first element, elements, and offset."""


def pin_known(state: TieredState, folders: Folders, entry: Entry) -> None:
    """Open the swap files that a snapshot needs, and pin what it has in them. A file that is
    missing is left out, and what is in it: who needs it is told, see ``check_files``.

    Raises ``OSError`` for one that is there and cannot be opened; nothing is pinned then.
    """
    if state.extents is None:
        return
    files = {part.file for parts in entry.contents.ranges.values() for part in parts}
    for name in sorted(files):
        place = folders.file(name)
        if name not in state.extents.names and place is not None:
            number, path = place
            state.extents.adopt(name, path, number)
    pinned = set(entry.pinned)
    for parts in entry.contents.ranges.values():
        extent = extent_of(parts, state.extents.names)
        if extent is not None and extent not in pinned:
            state.extents.pin([extent], are_used=False)
            entry.pinned.append(extent)
    if state.extents.transfers.verifies:
        _note_sums(state.extents, entry)


def _note_sums(extents: ExtentStore, entry: Entry) -> None:
    """What was written to files of other processes. Of its own a process knows more."""
    try:
        known = read_sums(entry)
    except (OSError, ValueError) as error:
        _log.warning(
            "what the snapshot %s keeps on NVMe is not verified: %s", entry.point.name, error
        )
        return
    own = extents.names[: extents.num_directories]
    for part, sums in known.items():
        extent = extent_of([part], extents.names)
        if extent is not None and part.file not in own:
            extents.transfers.note_sums(extent, [sums])


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
    for name, ranges in entry.contents.by_file.items():
        place = folders.file(name)
        if place is None:
            raise AioError(
                f"the snapshot {entry.point.name} has a part of the state in the file {name}.swap, "
                "which is in none of the nvme directories: give all that it was taken with",
                errno=errno.ENOENT,
                filename=f"{name}.swap",
            )
        check_length(place[1], place[1].stat().st_size, ranges)


def alike(state: TieredState, contents: Contents) -> dict[int, int]:
    """The subgroups that are at home in the same tier, now and in a snapshot, with the same parts
    of parameters and the same components: by their number of now, that in the snapshot. Whole units
    only.
    """
    names = [name for name, _ in contents.parameters]
    saved: dict[Cut, int] = {
        tuple((names[s.parameter], s.start, s.length, s.offset) for s in group.segments): number
        for number, group in enumerate(contents.groups)
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
    return (
        state.components.is_array(number) == there.is_host
        and here == there.components
        and state.layout.subgroups[number].numel == there.numel
    )


def adopt(state: TieredState, contents: Contents, groups: Mapping[int, int]) -> None:
    """Let the extents of a snapshot, which are pinned, be the state of those of these subgroups
    that are on NVMe.
    """
    state.num_changes += 1
    names = [] if state.extents is None else state.extents.names
    for number, other in groups.items():
        there = contents.groups[other]
        for component in () if there.is_host else there.components:
            parts = contents.ranges.get((other, component.name))
            extent = None if parts is None else extent_of(parts, names)
            assert parts is None or extent is not None
            state.components.adopt(number, component.name, extent)


def fill_host(
    state: TieredState, folder: Path, groups: Mapping[int, int], staging_bytes: int
) -> None:
    """Read into memory what those of these subgroups have that are at home there, or on a
    device.
    """
    hosts = {
        str(other): {name: _target(state, number, name) for name in state.components.names(number)}
        for number, other in groups.items()
        if state.components.is_array(number)
    }
    if hosts:
        tree = {"host": hosts}
        checkpoint.load(folder, only=names_of(tree), into=tree, staging_bytes=staging_bytes)


def _target(state: TieredState, subgroup: int, name: str) -> torch.Tensor | _ArrayBytes:
    arrays = state.components.arrays
    if arrays.is_on_device(subgroup):
        return _ArrayBytes(arrays, subgroup, name)
    return arrays.of(subgroup, name)


@dataclass(frozen=True, slots=True)
class _ArrayBytes:
    """A component on a device, as a ``checkpoint.ByteSink``."""

    arrays: Arrays
    subgroup: int
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.arrays.of(self.subgroup, self.name).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.arrays.of(self.subgroup, self.name).numel(),)

    def write(self, start: int, data: memoryview) -> None:
        """Set the bytes from byte ``start``; whole elements."""
        values = torch.frombuffer(data, dtype=self.dtype)
        self.arrays.write(self.subgroup, self.name, start // self.dtype.itemsize, values)
