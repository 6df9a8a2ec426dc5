"""In which pieces a data file is read: pure arithmetic over wanted ranges of chunks.

Invariants: every wanted byte is in one piece; a piece lies in one checksum block, and where blocks
are verified all of each touched block is read, in order; staged runs begin at multiples of 4096 and
are at most `run_bytes` long; runs come in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT, align_up

MAX_GAP_BYTES = 64 << 10
"""Unwanted bytes worth reading so as not to begin another request."""


class Wanted(NamedTuple):
    """Bytes [first, last) of a chunk of `nbytes` at `offset` of the file.

    `direct` if the device may put whole pages of it where they belong, without staging.
    """

    offset: int
    nbytes: int
    first: int
    last: int
    direct: bool = False


class ReadPiece(NamedTuple):
    """Bytes of chunk number `chunk`, `first` on, at `place` of the run; `kept` if wanted."""

    chunk: int
    first: int
    place: int
    nbytes: int
    kept: bool


@dataclass(slots=True)
class ReadRun:
    """One read of `nbytes` at `offset` of the file. A direct run is one piece."""

    offset: int
    nbytes: int = 0
    direct: bool = False
    pieces: list[ReadPiece] = field(default_factory=list)


def plan_reads(wanted: Iterable[Wanted], run_bytes: int, *, verify: bool) -> Iterator[ReadRun]:
    """Yields the runs that read what is wanted; `wanted` is in the order of the file, and taken
    no further than the runs that have been yielded need."""
    assert run_bytes > 0
    assert run_bytes % ALIGNMENT == 0
    run = ReadRun(0)
    for number, item in enumerate(wanted):
        first, last = _to_blocks(item) if verify else (item.first, item.last)
        if item.direct and first == item.first and last == item.last:
            body = (last - first) // ALIGNMENT * ALIGNMENT
            if first % ALIGNMENT == 0 and body:
                yield from _finish(run)
                yield from _direct_runs(number, item.offset, first, body)
                run = ReadRun(0)
                first += body
        while first < last:
            run, full = _room(run, item.offset + first, run_bytes)
            yield from full
            first += _add_piece(run, number, item, first, last, run_bytes)
    yield from _finish(run)


def _to_blocks(item: Wanted) -> tuple[int, int]:
    """Widens a range to whole checksum blocks."""
    if item.first >= item.last:
        return item.first, item.last
    first = item.first // CRC_BLOCK_BYTES * CRC_BLOCK_BYTES
    last = -(-item.last // CRC_BLOCK_BYTES) * CRC_BLOCK_BYTES
    return first, min(last, item.nbytes)


def _finish(run: ReadRun) -> Iterator[ReadRun]:
    """The end is rounded up to whole pages; files are multiples of 4096 long."""
    if run.pieces:
        run.nbytes = align_up(run.nbytes)
        yield run


def _room(run: ReadRun, position: int, run_bytes: int) -> tuple[ReadRun, Iterator[ReadRun]]:
    """The run that takes a byte at this position of the file, and the one that is full, if any."""
    end = run.offset + run.nbytes
    near = run.pieces and 0 <= position - end <= MAX_GAP_BYTES
    if near and position - run.offset < run_bytes:
        run.nbytes = position - run.offset
        return run, iter(())
    start = position // ALIGNMENT * ALIGNMENT
    return ReadRun(start, position - start), _finish(run)


def _add_piece(
    run: ReadRun, number: int, item: Wanted, first: int, last: int, run_bytes: int
) -> int:
    end = min(last, first + run_bytes - run.nbytes)
    end = min(end, first - first % CRC_BLOCK_BYTES + CRC_BLOCK_BYTES)
    kept = item.first <= first < item.last
    # Where what is wanted begins or ends, the piece ends too.
    for edge in (item.first, item.last):
        if first < edge < end:
            end = edge
    run.pieces.append(ReadPiece(number, first, run.nbytes, end - first, kept))
    run.nbytes += end - first
    return end - first


def _direct_runs(number: int, offset: int, first: int, nbytes: int) -> Iterator[ReadRun]:
    end = first + nbytes
    while first < end:
        part = min(CRC_BLOCK_BYTES - first % CRC_BLOCK_BYTES, end - first)
        piece = ReadPiece(number, first, 0, part, True)
        yield ReadRun(offset + first, part, True, [piece])
        first += part
