"""What of weights and gradients passes a link to a device at once: pure, no I/O.

A load is as large as a slot, whatever parameters are in it: small ones go together, and large ones
in pieces. The host waits for a device once a load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swap.plan.layout import DEVICE_ALIGNMENT, PIECE, Segment

NUM_SLOTS = 8
"""One that the kernel works on and one on its way up; the others come down meanwhile, as many as
the subgroup that comes next has loads for. Several small ones hide what starting a copy takes.
"""
LEAST_LINK_BYTES = 2 * 1024 * 1024
MOST_LINK_BYTES = 64 * 1024 * 1024
"""Loads of 8 MiB: there what the host does for each of them is little beside its kernel."""
_LINK_SHARE = 1 / 16
"""Of the budget."""


def link_sizes(budget_bytes: int) -> tuple[int, ...]:
    """Bytes of host memory for the slots of a link: what is of use, and then what is enough."""
    wanted = min(MOST_LINK_BYTES, int(budget_bytes * _LINK_SHARE))
    slot_bytes = wanted // NUM_SLOTS // PIECE * PIECE
    return max(LEAST_LINK_BYTES, slot_bytes * NUM_SLOTS), LEAST_LINK_BYTES


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements of ``segment`` from ``start`` on, of so many bytes each."""

    segment: Segment
    start: int
    weight_itemsize: int
    gradient_itemsize: int

    def bytes_of(self, num_elements: int) -> int:
        """What that many take in a slot."""
        sizes = self.weight_itemsize, self.gradient_itemsize
        return sum(_aligned(num_elements * size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of ``segment``; in the slot, its weights are from byte
    ``weight_start`` on, its gradient from ``gradient_start`` on.
    """

    segment: Segment
    start: int
    stop: int
    weight_start: int
    gradient_start: int


def loads_of(wanted: Iterable[Wanted], slot_bytes: int) -> list[tuple[Piece, ...]]:
    """Pieces of all that is wanted, in order, one load after the other. A segment is cut only where
    no component begins in the midst of a page.
    """
    loads: list[list[Piece]] = []
    used = slot_bytes
    for one in wanted:
        start = one.start
        while start < one.segment.length:
            if (stop := _stop_within(one, start, slot_bytes - used)) == start:
                loads.append([])
                used = 0
                stop = _stop_within(one, start, slot_bytes)
            gradient_start = used + _aligned((stop - start) * one.weight_itemsize)
            loads[-1].append(Piece(one.segment, start, stop, used, gradient_start))
            used += one.bytes_of(stop - start)
            start = stop
    return [tuple(load) for load in loads]


def _stop_within(one: Wanted, start: int, room_bytes: int) -> int:
    """Where a piece from ``start`` on ends that takes as much of the room as it can."""
    left = one.segment.length - start
    if one.bytes_of(left) <= room_bytes:
        return one.segment.length
    whole = room_bytes // one.bytes_of(PIECE)
    return start + whole * PIECE


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT
