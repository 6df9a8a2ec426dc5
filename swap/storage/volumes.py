"""Extents, and the files that they are in."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aio import AioError, File, RangeAllocator, naming
from aio.process.descriptors import Descriptor
from swap.interruptions.forks import note
from swap.storage.checksums import BlockSums
from swap.storage.drives.directory import SwapDirectory

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` at ``offset`` of one directory's swap file, both multiples of ``ALIGNMENT``; or
    where ``pieces`` are.
    """

    directory: int
    offset: int
    nbytes: int
    pieces: tuple[Extent, ...] = ()
    """What it was put together from, in order, the first of which is at ``offset``; or nothing."""

    @property
    def ranges(self) -> tuple[Extent, ...]:
        """The ranges of files that it consists of."""
        return self.pieces or (self,)


class SharedFile(Descriptor):
    """A file that several may read, of which one, who has it by itself, may give ranges back: a
    block whose values are to be read still (`RestoreError`) has it open after its end. Each has a
    shared `flock` on it; a forked child has none.
    """

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``."""
        super().__init__(path, os.O_RDWR, exact=True)
        note(self)
        with naming(path):
            fcntl.flock(self.number, fcntl.LOCK_SH)

    def after_fork(self) -> None:
        self.close()

    def punch(self, offset: int, nbytes: int) -> bool:
        """As of any; False, too, where others may read it."""
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return super().punch(offset, nbytes)
        finally:  # what fails has lost the lock that was there
            fcntl.flock(self.number, fcntl.LOCK_SH)


@dataclass(slots=True)
class Volume:
    """One directory's file, its free ranges, and how much load it was given for its share."""

    name: str
    file: File
    lane: int
    """Which directory's lanes it uses."""
    share: float = 0.0
    ranges: RangeAllocator = field(default_factory=lambda: RangeAllocator(0, alignment=ALIGNMENT))
    directory: SwapDirectory | None = None
    holes: SharedFile | None = None
    """Of an adopted file: by what its ranges are given back."""
    is_avoided: bool = False
    """Whether new extents go to others, as a write here has failed."""
    sums: BlockSums | None = None
    """Of what was written to it, if reads are compared with that."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.ranges.nbytes

    @property
    def used_bytes(self) -> int:
        return self.ranges.used_bytes

    def grow(self, nbytes: int) -> None:
        """Make the file longer, with space for it. Raises ``AioError``."""
        self.file.allocate(self.nbytes, nbytes)
        self.ranges.grow(nbytes)

    def give_back(self, offset: int, *sizes: int) -> None:
        """Ranges of so many bytes each, side by side, that nothing keeps any more."""
        if self.holes is None:
            self.ranges.release(offset, *sizes)
        else:
            with suppress(AioError):  # the space comes back when the file is removed
                self.holes.punch(offset, sum(sizes))


def taken_at_end(volume: Volume, nbytes: int) -> int:
    """How much of ``nbytes`` the file has been made longer by. Nothing tells how much it may be
    (quotas, limits, reserved blocks), so ever smaller parts are asked for.
    """
    taken, part = 0, nbytes
    while taken < nbytes and part:
        part = min(part, nbytes - taken)
        try:
            volume.file.allocate(volume.nbytes + taken, part)
            taken += part
        except AioError:
            part = part // 2 // ALIGNMENT * ALIGNMENT
    return taken


def grown_anywhere(volumes: Sequence[Volume], nbytes: int) -> int:
    """Grow the files by ``nbytes`` in all, wherever there is room; gives what there is no room
    for, and then nothing has grown.
    """
    grown: list[tuple[Volume, int]] = []
    for volume in volumes:
        grown.append((volume, taken_at_end(volume, nbytes)))
        nbytes -= grown[-1][1]
    for volume, size in grown:
        if not nbytes:
            volume.ranges.grow(size)
        elif size:
            with suppress(AioError):  # the next growth takes what is there for nothing
                volume.file.truncate(volume.nbytes)
    return nbytes


def parts_of(extent: Extent, start: int, buffer: Any) -> Iterator[tuple[Extent, int, memoryview]]:
    """(piece, byte in it, part of ``buffer``) for a transfer from byte ``start`` on."""
    data, first = memoryview(buffer).cast("B"), 0
    for piece in extent.pieces:
        low, high = max(start, first), min(start + len(data), first + piece.nbytes)
        if low < high:
            yield piece, low - first, data[low - start : high - start]
        first += piece.nbytes


def place_in(extent: Extent, directory: int, offset: int) -> int | None:
    """Which byte of ``extent`` is at that place of a file; None if it is not in it."""
    first = 0
    for piece in extent.ranges:
        if piece.directory == directory and 0 <= offset - piece.offset < piece.nbytes:
            return first + offset - piece.offset
        first += piece.nbytes
    return None


def side_by_side(pieces: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Runs of ``pieces``, each of which begins where the one before it ends."""
    run: list[Extent] = []
    for piece in pieces:
        last = run[-1] if run else None
        if last and (last.directory, last.offset + last.nbytes) != (piece.directory, piece.offset):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
