"""How parameters are cut into subgroups: pure arithmetic, no I/O.

A *subgroup* is what the optimizer reads, updates and writes as one: a run of whole parameters, or
one part of a parameter that is larger than a subgroup. Its bytes are kept as *components*, one
array for each kind of value (weight, the low half of the master, moments), so that a forward pass
can fetch weights alone.

Invariants:
- every segment starts at a multiple of ``PIECE`` elements in its subgroup and in its parameter, so
  every component of every dtype starts on a page and direct I/O needs no bounce;
- the segments of a parameter cover it exactly once, in order;
- a parameter that fits into one subgroup is never split (its weights are then one contiguous view);
- all parameters of a subgroup share the dtype of their weights, whether they are trained, and
  whether their state alone is kept.

Subgroups follow ZeRO-Infinity (arXiv 2104.07857, section 5.2); components are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

DEVICE_ALIGNMENT = 512
"""Of ranges of device memory, as torch aligns what it allocates: kernels are chosen by it."""
PIECE = 4096
"""Elements to which segments are aligned: a page even for one-byte dtypes."""
PAGE = 4096
"""Bytes to which components are padded, for direct I/O."""
CHUNK_BYTES = 128 * 1024
"""Of what direct I/O cannot take as it is: copied so much at a time, see ``memory.passage``."""
PASSAGE_BYTES = 4 * (CHUNK_BYTES + PAGE)
"""Four chunks in flight, each with room to start anywhere in a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What the layout needs to know of a parameter; ``numel`` is this rank's elements.

    ``state_only``: its weights and gradients are the program's, only optimizer state is kept.
    """

    index: int
    name: str
    numel: int
    dtype: torch.dtype
    trainable: bool
    always_on_host: bool = False
    state_only: bool = False

    @property
    def padded_numel(self) -> int:
        return pad(self.numel)

    @property
    def weight_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Component:
    """One array of a subgroup: a value for each of its elements, or for each block of ``per`` of
    them (which divides ``PIECE``). ``zero`` components start as all zeros.
    """

    name: str
    dtype: torch.dtype
    zero: bool = False
    per: int = 1

    def count(self, elements: int) -> int:
        """Values for so many elements; the last block may be partial."""
        return -(-elements // self.per)

    def nbytes(self, elements: int) -> int:
        """Bytes that the values for so many elements take, in whole pages."""
        return -(-self.count(elements) * self.dtype.itemsize // PAGE) * PAGE

    def part(self, first: int, length: int) -> slice:
        """Where the values of elements ``[first, first + length)`` are, from a whole block on."""
        return slice(first // self.per, self.count(first + length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements ``[start, start + length)`` of a parameter, at ``offset`` in its subgroup."""

    parameter: int
    subgroup: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgroup:
    """A unit of update. ``numel`` counts padding; ``unit`` is shared by the parts of one split
    parameter.
    """

    index: int
    unit: int
    dtype: torch.dtype
    trainable: bool
    always_on_host: bool
    state_only: bool
    numel: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A subgroup of whole parameters, or the subgroups that are the parts of one that is split.

    ``first`` is the index of its first subgroup. ``sizes``: how many subgroups there are of so many
    elements, padding counted; there are two sizes at most, however many parts.
    """

    index: int
    first: int
    parameters: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    always_on_host: bool
    state_only: bool
    sizes: tuple[tuple[int, int], ...]

    @property
    def num_subgroups(self) -> int:
        return sum(count for _, count in self.sizes)

    @property
    def numel(self) -> int:
        return sum(elements * count for elements, count in self.sizes)

    @property
    def largest(self) -> int:
        """Elements of its largest subgroup."""
        return max(elements for elements, _ in self.sizes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every parameter and every subgroup, and the way from one to the other.

    Subgroups are made when they are asked for: a large model has hundreds of thousands, and as many
    units as it has parameters.
    """

    specs: tuple[ParameterSpec, ...]
    units: tuple[Unit, ...]
    subgroup_elements: int

    @cached_property
    def subgroups(self) -> tuple[Subgroup, ...]:
        return tuple(group for unit in self.units for group in self._subgroups(unit))

    @cached_property
    def segments_of(self) -> tuple[tuple[Segment, ...], ...]:
        segments: list[list[Segment]] = [[] for _ in self.specs]
        for subgroup in self.subgroups:
            for segment in subgroup.segments:
                segments[segment.parameter].append(segment)
        return tuple(map(tuple, segments))

    def subgroups_of(self, parameter: int) -> tuple[int, ...]:
        return tuple(segment.subgroup for segment in self.segments_of[parameter])

    def _subgroups(self, unit: Unit) -> Iterator[Subgroup]:
        members = [self.specs[parameter] for parameter in unit.parameters]
        if len(members) > 1 or unit.num_subgroups == 1:
            yield _subgroup(unit, unit.first, [(spec, 0, spec.numel) for spec in members])
            return
        parts = split_evenly(members[0].numel, self.subgroup_elements)
        for number, (start, length) in enumerate(parts):
            yield _subgroup(unit, unit.first + number, [(members[0], start, length)])


def parameters_at(segments: Iterable[Segment], component: Component, at: int) -> list[int]:
    """Those that have values in the page which begins at byte ``at`` of a component of a subgroup
    with these segments.
    """
    first, count = at // component.dtype.itemsize, PAGE // component.dtype.itemsize
    parts = ((s.parameter, component.part(s.offset, s.length)) for s in segments)
    return [index for index, here in parts if here.start < first + count and first < here.stop]


def pad(numel: int) -> int:
    """``numel`` rounded up to whole pieces; at least one, so that empty parameters have a place."""
    return max(1, -(-numel // PIECE)) * PIECE


def pack(specs: Sequence[ParameterSpec], subgroup_elements: int) -> Layout:
    """Cut ``specs``, in the order given, into subgroups of at most ``subgroup_elements`` elements.

    ``subgroup_elements`` is a multiple of ``PIECE``. Resident parameters share subgroups of their
    own.
    """
    assert subgroup_elements % PIECE == 0
    assert subgroup_elements > 0
    packer = _Packer(subgroup_elements)
    for spec in specs:
        packer.add(spec)
    return Layout(specs=tuple(specs), units=packer.finish(), subgroup_elements=subgroup_elements)


def split_evenly(numel: int, most: int) -> Iterable[tuple[int, int]]:
    """(start, length) of the fewest near-equal parts of at most ``most`` elements, cut at whole
    pieces.
    """
    pieces = pad(numel) // PIECE
    parts = -(-pieces * PIECE // most)
    for part in range(parts):
        start = part * pieces // parts * PIECE
        stop = min(numel, (part + 1) * pieces // parts * PIECE)
        yield start, stop - start


def _sizes(numel: int, most: int) -> tuple[tuple[int, int], ...]:
    """Of the parts that ``split_evenly`` makes: elements with padding, and how many have so many.

    Of 10 pieces in 4 parts two have 3 pieces and two have 2.
    """
    pieces = pad(numel) // PIECE
    parts = -(-pieces * PIECE // most)
    least, longer = divmod(pieces, parts)
    sizes = (((least + 1) * PIECE, longer), (least * PIECE, parts - longer))
    return tuple((elements, count) for elements, count in sizes if count)


def neighbours(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each parameter, those that share a subgroup with it, itself included."""
    shared: list[set[int]] = [set() for _ in layout.specs]
    for group in layout.subgroups:
        members = {segment.parameter for segment in group.segments}
        for parameter in members:
            shared[parameter] |= members
    return tuple(tuple(sorted(others)) for others in shared)


def parts_of(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """For each parameter that has a part in ``subgroups``, their indices."""
    parts: dict[int, tuple[int, ...]] = {}
    for subgroup in subgroups:
        for segment in subgroup.segments:
            parts[segment.parameter] = (*parts.get(segment.parameter, ()), subgroup.index)
    return parts


_Kind = tuple[torch.dtype, bool, bool, bool]


class _Packer:
    """Open units by kind; one is closed when the next parameter of its kind does not fit."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open: dict[_Kind, list[ParameterSpec]] = {}
        self._closed: list[list[ParameterSpec]] = []

    def add(self, spec: ParameterSpec) -> None:
        kind = (spec.dtype, spec.trainable, spec.always_on_host, spec.state_only)
        used = sum(other.padded_numel for other in self._open.get(kind, ()))
        if used + spec.padded_numel > self._capacity:
            self._close(kind)
        self._open.setdefault(kind, []).append(spec)

    def finish(self) -> tuple[Unit, ...]:
        for kind in list(self._open):
            self._close(kind)
        self._closed.sort(key=lambda members: members[0].index)
        units: list[Unit] = []
        first = 0
        for members in self._closed:
            units.append(self._unit(len(units), first, members))
            first += units[-1].num_subgroups
        return tuple(units)

    def _close(self, kind: _Kind) -> None:
        members = self._open.pop(kind, [])
        if members:
            self._closed.append(members)

    def _unit(self, index: int, first: int, members: list[ParameterSpec]) -> Unit:
        spec = members[0]
        numel = sum(member.padded_numel for member in members)
        is_split = numel > self._capacity
        return Unit(
            index=index,
            first=first,
            parameters=tuple(member.index for member in members),
            dtype=spec.dtype,
            trainable=spec.trainable,
            always_on_host=spec.always_on_host,
            state_only=spec.state_only,
            sizes=_sizes(spec.numel, self._capacity) if is_split else ((numel, 1),),
        )


def _subgroup(unit: Unit, index: int, parts: list[tuple[ParameterSpec, int, int]]) -> Subgroup:
    segments, offset = [], 0
    for spec, start, length in parts:
        segments.append(
            Segment(parameter=spec.index, subgroup=index, start=start, length=length, offset=offset)
        )
        offset += pad(length)
    return Subgroup(
        index=index,
        unit=unit.index,
        dtype=unit.dtype,
        trainable=unit.trainable,
        always_on_host=unit.always_on_host,
        state_only=unit.state_only,
        numel=offset,
        segments=tuple(segments),
    )
