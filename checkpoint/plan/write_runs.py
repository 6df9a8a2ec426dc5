"""In which pieces a data file is written: pure arithmetic, front to back.

A file is cut into runs, each one request of the engine. A staged run is gathered in staging memory
from pieces of many tensors; a direct run is written from where the tensor lies.

Invariants: runs follow each other without a gap, each begins and ends at a multiple of 4096; no
piece crosses a checksum block; a staged run is at most `run_bytes` long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT, align_up

STAGING_BYTES = 256 << 20
"""Host memory that a save or a load may take beyond the tensors themselves."""


def check_staging_bytes(staging_bytes: object) -> None:
    """Raises TypeError for what is no number of bytes, ValueError for one below 0."""
    if not isinstance(staging_bytes, int):
        raise TypeError(f"staging_bytes={staging_bytes!r} is no number of bytes; give an int")
    if staging_bytes < 0:
        raise ValueError(f"staging_bytes={staging_bytes} is less than 0")


ZEROS = -1
"""Extent number of a piece of padding."""


class Extent(NamedTuple):
    """Bytes of one source in the file; `direct` if they can be written from where they lie."""

    offset: int
    nbytes: int
    direct: bool = False


Piece = tuple[int, int, int, int]
"""(extent number, first byte in it, place in the run, bytes); a plain tuple, there are many."""


@dataclass(slots=True)
class Run:
    """One write: `nbytes` at `offset`. A direct run has one piece, and no staging memory."""

    offset: int
    nbytes: int = 0
    direct: bool = False
    pieces: list[Piece] = field(default_factory=list)


def plan_runs(extents: Sequence[Extent], file_nbytes: int, run_bytes: int) -> Iterator[Run]:
    """Yields the runs of a file whose extents are given in order; gaps become zeros."""
    assert run_bytes > 0
    assert run_bytes % ALIGNMENT == 0
    run = Run(0)
    for number, extent in enumerate(extents):
        _add_zeros(run, extent.offset)
        first = 0
        if extent.direct:
            if run.nbytes:
                yield run
            first = extent.nbytes // ALIGNMENT * ALIGNMENT
            yield from _direct_runs(number, extent.offset, first)
            run = Run(extent.offset + first)
        while first < extent.nbytes:
            if run.nbytes == run_bytes:
                yield run
                run = Run(extent.offset + first)
            first += _add_piece(run, number, first, extent.nbytes - first, run_bytes)
    _add_zeros(run, file_nbytes)
    if run.nbytes:
        yield run


def _direct_runs(number: int, offset: int, nbytes: int) -> Iterator[Run]:
    for first in range(0, nbytes, CRC_BLOCK_BYTES):
        part = min(CRC_BLOCK_BYTES, nbytes - first)
        yield Run(offset + first, part, True, [(number, first, 0, part)])


def _add_piece(run: Run, number: int, first: int, left: int, run_bytes: int) -> int:
    to_block_end = CRC_BLOCK_BYTES - first % CRC_BLOCK_BYTES
    nbytes = min(left, to_block_end, run_bytes - run.nbytes)
    run.pieces.append((number, first, run.nbytes, nbytes))
    run.nbytes += nbytes
    return nbytes


def _add_zeros(run: Run, until: int) -> None:
    """Fills up to the next extent; less than 4096 bytes, which never cross the end of a run."""
    gap = until - run.offset - run.nbytes
    if gap:
        run.pieces.append((ZEROS, 0, run.nbytes, gap))
        run.nbytes += gap


@dataclass(frozen=True, slots=True)
class Slots:
    """How staging memory is cut for one file: `count` buffers of `nbytes` each."""

    count: int
    nbytes: int


MAX_SLOT_BYTES = 2 << 20
MAX_SLOTS = 16
LARGE_SLOT_BYTES = 8 << 20
LARGE_SLOTS = 4
"""Beside training: every buffer that is handed on takes the interpreter and a core from it."""
DEVICE_SLOT_BYTES = 16 << 20
DEVICE_SLOTS = 8
"""Of what comes from a device: a copy of its own for each tensor in a buffer, waited for as one."""


def plan_slots(
    file_nbytes: int,
    budget_bytes: int,
    max_count: int | None = MAX_SLOTS,
    max_bytes: int = MAX_SLOT_BYTES,
) -> Slots:
    """Buffers for one file within its share of the budget: two at least, to fill one while another
    is written, or one that takes all of a small file.

    Raises ValueError if the share is too small for two buffers of 4096 bytes.
    """
    if align_up(file_nbytes) <= min(budget_bytes, max_bytes):
        return Slots(1, align_up(file_nbytes))
    if budget_bytes < 2 * ALIGNMENT:
        raise ValueError(
            f"{budget_bytes} bytes of staging memory for a data file are less than "
            f"{2 * ALIGNMENT}; raise staging_bytes or use fewer stripe_dirs"
        )
    nbytes = min(max_bytes, budget_bytes // 2 // ALIGNMENT * ALIGNMENT)
    count = min(budget_bytes // nbytes, -(-file_nbytes // nbytes))
    return Slots(count if max_count is None else min(count, max_count), nbytes)
