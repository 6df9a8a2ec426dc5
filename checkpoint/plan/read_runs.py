"""In which pieces a data file is read: pure arithmetic over wanted ranges of chunks.

Invariants: every wanted byte is in one piece; where chunks are verified all of each unit (a
checksum block, or a grain where a part of a block is wanted) that is touched is read, in order; the
spans of a run begin at multiples of 4096 of the file and of its memory, and have `run_bytes`
together at most; runs come in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT, align_up
from checkpoint.format.records import ChunkRecord

MAX_GAP_BYTES = 64 << 10
_GAP_PART = 16
"""Unwanted bytes are read so as not to begin another request: less than a page, or up to the former
as long as those of a span are not more than one in so many.
"""

MAX_SPANS = 512
"""Of a run: each is a request of its own."""


class Wanted(NamedTuple):
    """Bytes [first, last) of a chunk of `nbytes` at `offset` of the file, verified in units.

    `direct` if the device may put whole pages of it where they belong, without staging.
    """

    offset: int
    nbytes: int
    first: int
    last: int
    direct: bool = False
    unit: int = CRC_BLOCK_BYTES


class ReadPiece(NamedTuple):
    """Bytes of chunk number `chunk`, `first` on, at `place` of the run; `kept` if wanted."""

    chunk: int
    first: int
    place: int
    nbytes: int
    kept: bool


class Span(NamedTuple):
    """Bytes at `offset` of the file that come to `place` of the run's memory."""

    offset: int
    place: int
    nbytes: int


@dataclass(slots=True)
class ReadRun:
    """Reads into `nbytes` of memory, a request each span. A direct run is one piece in one span."""

    nbytes: int = 0
    direct: bool = False
    spans: list[Span] = field(default_factory=list)
    pieces: list[ReadPiece] = field(default_factory=list)


def unit_of(chunk: ChunkRecord, first: int, last: int) -> int:
    """In which units bytes [first, last) of a chunk are verified: blocks that are wanted whole by
    their own sums.
    """
    is_whole = first % CRC_BLOCK_BYTES == 0 and (
        last % CRC_BLOCK_BYTES == 0 or last == chunk.nbytes
    )
    return CRC_BLOCK_BYTES if is_whole else chunk.unit_nbytes


def plan_reads(wanted: Iterable[Wanted], run_bytes: int, *, verify: bool) -> Iterator[ReadRun]:
    """Yields the runs that read what is wanted; `wanted` is in the order of the file, and taken
    no further than the runs that have been yielded need."""
    assert run_bytes > 0
    assert run_bytes % ALIGNMENT == 0
    filling = _Filling(run_bytes)
    for number, item in enumerate(wanted):
        first, last = _to_units(item) if verify else (item.first, item.last)
        if item.direct and first == item.first and last == item.last:
            # Of a unit that ends with the chunk the last page may be no whole one.
            body = (last - first) // ALIGNMENT * ALIGNMENT
            if first % ALIGNMENT == 0 and body:
                yield from filling.finish()
                yield from _direct_runs(number, item.offset, first, body)
                first += body
        while first < last:
            yield from filling.room(item.offset + first)
            first += filling.add(number, item, first, last)
    yield from filling.finish()


def _to_units(item: Wanted) -> tuple[int, int]:
    """Widens a range to whole units."""
    if item.first >= item.last:
        return item.first, item.last
    first = item.first // item.unit * item.unit
    last = -(-item.last // item.unit) * item.unit
    return first, min(last, item.nbytes)


class _Filling:
    """The run that pieces are added to, and its last span, which is still open."""

    def __init__(self, run_bytes: int) -> None:
        self._run_bytes = run_bytes
        self._run = ReadRun()
        self._begin(0)

    def _begin(self, position: int) -> None:
        """A span with this byte of the file, where the ones before it end."""
        self._offset = position // ALIGNMENT * ALIGNMENT
        self._place = align_up(self._run.nbytes)
        self._run.nbytes = self._place + position - self._offset
        self._gaps = 0

    def _end_span(self) -> None:
        """It is rounded up to whole pages; files are multiples of 4096 long."""
        nbytes = align_up(self._run.nbytes) - self._place
        self._run.spans.append(Span(self._offset, self._place, nbytes))

    def finish(self) -> Iterator[ReadRun]:
        """The run, if it has anything; the next one is empty."""
        run = self._run
        if run.pieces:
            self._end_span()
            run.nbytes = align_up(run.nbytes)
            yield run
        self._run = ReadRun()
        self._begin(0)

    def room(self, position: int) -> Iterator[ReadRun]:
        """Gets ready to add a byte at this position of the file; yields the run that is full."""
        run = self._run
        if not run.pieces:
            self._begin_again(position)
            return
        used = run.nbytes - self._place
        gap = position - self._offset - used
        is_near = 0 <= gap < ALIGNMENT or (
            0 <= gap <= MAX_GAP_BYTES and (self._gaps + gap) * _GAP_PART <= used - self._gaps
        )
        if is_near and run.nbytes + gap < self._run_bytes:
            run.nbytes += gap
            self._gaps += gap
        elif not is_near and self._has_room_for_span(position):
            self._end_span()
            self._begin(position)
        else:
            yield from self.finish()
            self._begin_again(position)

    def _has_room_for_span(self, position: int) -> bool:
        place = align_up(self._run.nbytes) + position % ALIGNMENT
        return place < self._run_bytes and len(self._run.spans) < MAX_SPANS - 1

    def _begin_again(self, position: int) -> None:
        self._run.nbytes = 0
        self._begin(position)

    def add(self, number: int, item: Wanted, first: int, last: int) -> int:
        """Adds bytes from `first` on, up to `last`; gives how many."""
        run = self._run
        end = min(last, first + self._run_bytes - run.nbytes)
        if item.unit == CRC_BLOCK_BYTES:
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
        yield ReadRun(part, True, [Span(offset + first, 0, part)], [piece])
        first += part


def independent(pieces: Sequence[ReadPiece], units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts pieces into ranges of which none continues the unit of another."""
    low = 0
    for index in range(1, len(pieces)):
        piece = pieces[index]
        if piece.first % units[index] and piece.chunk == pieces[index - 1].chunk:
            yield low, index
            low = index
    yield low, len(pieces)
