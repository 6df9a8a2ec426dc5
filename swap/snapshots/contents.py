"""Where the bytes of a snapshot are, as a tree of plain values and tables: pure, no I/O.

The cut into subgroups and the components of each are written down, so a snapshot can be read into
state that is cut in another way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swap.plan.layout import PAGE, PIECE, Component, Segment, parameters_at

_FILE_NAME = re.compile(r"[0-9a-f]{12}")

Key = tuple[int, str]
"""A subgroup and the name of a component."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` at ``offset`` of the swap file with that name."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A subgroup as it was: ``numel`` counts padding."""

    components: tuple[Component, ...]
    numel: int
    is_host: bool
    segments: tuple[Segment, ...]

    def component(self, name: str) -> Component:
        """Raises ``StopIteration`` for one that it has not."""
        return next(component for component in self.components if component.name == name)


@dataclass(frozen=True)
class Contents:
    """Parameters by name and number of elements, subgroups, and the ranges of each component that
    was on NVMe; one without was all zeros.
    """

    parameters: tuple[tuple[str, int], ...]
    groups: tuple[SavedGroup, ...]
    ranges: Mapping[Key, tuple[FileRange, ...]]

    @property
    def nbytes(self) -> int:
        """Of the ranges."""
        return sum(part.nbytes for parts in self.ranges.values() for part in parts)

    @property
    def by_file(self) -> Mapping[str, Sequence[FileRange]]:
        """The ranges, by the name of the swap file that they are in."""
        found: dict[str, list[FileRange]] = {}
        for parts in self.ranges.values():
            for part in parts:
                found.setdefault(part.file, []).append(part)
        return found

    @cached_property
    def segments_of(self) -> Mapping[str, tuple[Segment, ...]]:
        """Of each parameter, in the order of its elements."""
        found: dict[int, list[Segment]] = {}
        for group in self.groups:
            for segment in group.segments:
                found.setdefault(segment.parameter, []).append(segment)
        return {
            name: tuple(sorted(found.get(index, ()), key=lambda segment: segment.start))
            for index, (name, _) in enumerate(self.parameters)
        }

    def component(self, parameter: str, name: str) -> Component:
        """A component of the subgroups that a parameter is in."""
        return self.groups[self.segments_of[parameter][0].subgroup].component(name)

    def owner_of(self, file: str, offset: int) -> str:
        """Whose the bytes at an offset of a file are, in words."""
        for (subgroup, name), parts in self.ranges.items():
            first = 0
            for part in parts:
                if part.file == file and 0 <= offset - part.offset < part.nbytes:
                    return self._name_of(subgroup, name, first + offset - part.offset)
                first += part.nbytes
        return "no part of the snapshot"

    def _name_of(self, subgroup: int, name: str, at: int) -> str:
        group = self.groups[subgroup]
        found = parameters_at(group.segments, group.component(name), at)
        names = [self.parameters[parameter][0] for parameter in found]
        return f"{name} of {', '.join(names) or 'no parameter (padding)'}"

    def overlaps(
        self, parameter: str, name: str, start: int, length: int
    ) -> Iterator[tuple[Segment, int, int, int]]:
        """(segment, first value in its subgroup, first value in the range, values) for all that
        values ``[start, start + length)`` of a component of a parameter touch.
        """
        for segment in self.segments_of[parameter]:
            component = self.groups[segment.subgroup].component(name)
            here = component.part(segment.start, segment.length)
            low, high = max(start, here.start), min(start + length, here.stop)
            if low < high:
                at = segment.offset // component.per + low - here.start
                yield segment, at, low - start, high - low


def encode(contents: Contents) -> dict[str, Any]:
    """As a tree that ``decode`` takes; names are one text, as each node costs time of training."""
    kinds = list(dict.fromkeys(group.components for group in contents.groups))
    files = sorted({part.file for parts in contents.ranges.values() for part in parts})
    numbers = {file: number for number, file in enumerate(files)}
    places = [
        {component.name: place for place, component in enumerate(group.components)}
        for group in contents.groups
    ]
    return {
        "parameters": json.dumps(contents.parameters),
        "kinds": [[[c.name, c.dtype, c.zero, c.per] for c in kind] for kind in kinds],
        "files": files,
        "groups": _table(
            [(kinds.index(g.components), g.numel, int(g.is_host)) for g in contents.groups], 3
        ),
        "segments": _table(
            [
                (s.parameter, s.subgroup, s.start, s.length, s.offset)
                for group in contents.groups
                for s in group.segments
            ],
            5,
        ),
        "ranges": _table(
            [
                (subgroup, places[subgroup][name], numbers[part.file], part.offset, part.nbytes)
                for (subgroup, name), parts in contents.ranges.items()
                for part in parts
            ],
            5,
        ),
    }


def decode(tree: Mapping[str, Any]) -> Contents:
    """Raises ``ValueError`` for one that contradicts itself."""
    try:
        contents = _decode(tree)
        _check(contents)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tables contradict each other: {error!r}") from error
    return contents


def _decode(tree: Mapping[str, Any]) -> Contents:
    kinds = [tuple(_component(*told) for told in kind) for kind in tree["kinds"]]
    files = [_file_name(told) for told in tree["files"]]
    tables = [tree[name] for name in ("groups", "segments", "ranges")]
    if any(table.dtype is not torch.int64 or (table < 0).any() for table in tables):
        raise ValueError("a table has numbers that count nothing")
    groups = tree["groups"].tolist()
    segments: list[list[Segment]] = [[] for _ in groups]
    for parameter, subgroup, start, length, offset in tree["segments"].tolist():
        segments[subgroup].append(
            Segment(
                parameter=parameter, subgroup=subgroup, start=start, length=length, offset=offset
            )
        )
    found = tuple(
        SavedGroup(kinds[kind], numel, bool(is_host), tuple(own))
        for (kind, numel, is_host), own in zip(groups, segments, strict=True)
    )
    ranges: dict[Key, tuple[FileRange, ...]] = {}
    for subgroup, place, file, offset, nbytes in tree["ranges"].tolist():
        key = (subgroup, found[subgroup].components[place].name)
        ranges[key] = (*ranges.get(key, ()), FileRange(files[file], offset, nbytes))
    told = tree["parameters"]  # older snapshots have them in the tree
    pairs = json.loads(told) if isinstance(told, str) else told
    parameters = tuple((str(name), _count(numel)) for name, numel in pairs)
    return Contents(parameters, found, ranges)


def _component(name: object, dtype: object, zero: object, per: object) -> Component:
    if isinstance(name, str) and isinstance(dtype, torch.dtype) and isinstance(zero, bool):
        count = _count(per)
        if count and PIECE % count == 0:
            return Component(name, dtype, zero, count)
    raise ValueError(f"{(name, dtype, zero, per)!r:.200} is no component")


def _file_name(told: object) -> str:
    """It becomes part of a path."""
    if not isinstance(told, str) or not _FILE_NAME.fullmatch(told):
        raise ValueError(f"{told!r:.200} is no name of a swap file")
    return told


def _count(told: object) -> int:
    if type(told) is not int or not 0 <= told < 1 << 63:
        raise ValueError(f"{told!r:.200} is no number of anything")
    return told


def _check(contents: Contents) -> None:
    for (subgroup, name), parts in contents.ranges.items():
        group = contents.groups[subgroup]
        needed = group.component(name).nbytes(group.numel)
        aligned = all(p.offset >= 0 and not p.offset % PAGE and p.nbytes > 0 for p in parts)
        if not aligned or sum(part.nbytes for part in parts) < needed:
            raise ValueError(f"{name} of subgroup {subgroup} has not the {needed} bytes it needs")
    numels = [numel for _, numel in contents.parameters]
    for group in contents.groups:
        for segment in group.segments:
            last = segment.start + segment.length
            if min(segment.parameter, segment.start, segment.offset) < 0:
                raise ValueError(f"segment {segment} begins before its parameter")
            if last > numels[segment.parameter] or segment.offset + segment.length > group.numel:
                raise ValueError(f"segment {segment} ends behind its parameter or its subgroup")


def _table(rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), width)
