"""CRC-32C of what was written to a swap file, block by block, and reads that are compared with it.

Kept in memory, for every block of ``BLOCK`` bytes of the file: what the library wrote there last.
So whoever reads, in whatever parts, is told when a disk, a controller or another program gave or
left other bytes. Of a block that was never written, or not well, nothing is known, and nothing is
compared; no values are read from such.

The bytes are summed while they are on their way, and compared where their reader waits for them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aio import AioError, File, Operation, Request
from aio.checksum import block_crcs
from swap.plan.layout import PAGE
from swap.storage.joined import JoinedOperation

BLOCK = PAGE
"""Components begin at whole pages and are read from such on, so hardly a read has a part of one."""
_REMEDY = (
    "what is damaged stays so: go on from an older state, with offloaded.restore(name) of a "
    "snapshot that does not share it or offloaded.load(path), and look after that disk"
)

Submit = Callable[[Request], Operation]
Owner = Callable[[int, int], str | None]
"""Whose bytes those at an offset of the file of a number are, in words; None: not known there."""


class CorruptSwapError(AioError):
    """Bytes of a swap file are not those that were written to it.

    ``filename``, ``offset`` and ``nbytes`` say which; the message says what of which parameter they
    are. Reading them again is right (what failed may have been the way), and raises again where the
    disk keeps other bytes.
    """


@dataclass(frozen=True, slots=True)
class Damage:
    """Makes the error of one block."""

    file: File
    owner: Callable[[int], str]
    """Whose the bytes at an offset are."""

    def error(self, offset: int) -> CorruptSwapError:
        path = os.fspath(self.file.path)
        return CorruptSwapError(
            f"the {BLOCK} bytes at offset {offset} of {path} are not what was written there: "
            f"{self.owner(offset)}; {_REMEDY}",
            errno=errno.EIO,
            filename=path,
            offset=offset,
            nbytes=BLOCK,
        )


class BlockSums:
    """The sums of one file's blocks; 0 for one of which nothing is known. Thread-safe."""

    def __init__(self) -> None:
        self._sums = np.zeros(0, np.uint32)
        self._lock = threading.Lock()
        self.turn = threading.Lock()
        """Of those who write a part of a block."""

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._sums.nbytes

    def of(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy, for each block that the range touches."""
        first, stop = offset // BLOCK, -(-(offset + nbytes) // BLOCK)
        with self._lock:
            self._reach(stop)
            return self._sums[first:stop].copy()

    def put(self, offset: int, sums: np.ndarray | int) -> None:
        """From the block at ``offset`` on."""
        first = offset // BLOCK
        stop = first + np.size(sums)
        with self._lock:
            self._reach(stop)
            self._sums[first:stop] = sums

    def forget(self, offset: int, nbytes: int) -> None:
        """Nothing is known of the blocks that the range touches."""
        with self._lock:
            self._sums[offset // BLOCK : -(-(offset + nbytes) // BLOCK)] = 0

    def _reach(self, stop: int) -> None:
        if stop > self._sums.size:
            grown = np.zeros(max(stop, self._sums.size + self._sums.size // 8), np.uint32)
            grown[: self._sums.size] = self._sums
            self._sums = grown


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Of what was read with the sums. No function in a function: what such a one refers to an error
    that is kept would keep, and with it the memory of a read that failed.
    """

    request: Request
    expected: np.ndarray
    """Of all blocks that it touches."""
    edges: list[tuple[int, np.ndarray]]
    """Where blocks begin of which it has a part, and the whole of them."""
    damage: Damage

    def check(self) -> None:
        """Raises ``CorruptSwapError``."""
        offset, data = self.request.offset, _bytes(self.request.buffer)
        first = offset // BLOCK
        for edge, page in self.edges:
            here, there = _common(offset, len(data), edge)
            wrong = sums_of(page)[0] != self.expected[edge // BLOCK - first]
            if wrong or data[here] != _bytes(page)[there]:
                raise self.damage.error(edge)
        low, high = _whole(offset, len(data))
        if low < high:
            due = self.expected[low // BLOCK - first : high // BLOCK - first]
            found = sums_of(data[low - offset : high - offset])
            wrong = (found != due) & (due != 0)
            if wrong.any():
                raise self.damage.error(low + int(wrong.argmax()) * BLOCK)


class _CheckedRead(JoinedOperation):
    """Read, and for a reader of parts of blocks also the whole of these."""

    __slots__ = ("_comparison", "_lock")

    def __init__(
        self, request: Request, pieces: Sequence[Operation], comparison: _Comparison
    ) -> None:
        super().__init__(request, pieces)
        self._comparison: _Comparison | None = comparison
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> int:
        """Compares once: afterwards the memory is the caller's."""
        moved = super().result(timeout)
        with self._lock:
            if self._comparison is not None:
                self._comparison.check()
                self._comparison = None
        return moved


class _SummedWrite(JoinedOperation):
    """After an error nothing is known of what is on the disk."""

    __slots__ = ("_sums",)

    def __init__(self, request: Request, pieces: Sequence[Operation], sums: BlockSums) -> None:
        super().__init__(request, pieces)
        self._sums = sums

    def result(self, timeout: float | None = None) -> int:
        try:
            return super().result(timeout)
        except AioError:
            self._sums.forget(self.request.offset, len(_bytes(self.request.buffer)))
            raise


def sums_of(data: Any) -> np.ndarray:
    """Of whole blocks; none of them is 0."""
    crcs = block_crcs(data, BLOCK)
    return np.maximum(crcs, 1, out=crcs)


def zero_sums(nbytes: int) -> np.ndarray:
    """``sums_of`` so many zeros."""
    return np.repeat(sums_of(np.zeros(BLOCK, np.uint8)), nbytes // BLOCK)


def checked_read(request: Request, submit: Submit, sums: BlockSums, damage: Damage) -> Operation:
    """Start a read whose ``result`` raises ``CorruptSwapError`` for other bytes than were written.

    Of a block that is read in part, the whole is read beside it.
    """
    data = _bytes(request.buffer)
    expected = sums.of(request.offset, len(data))
    if not expected.any():
        return submit(request)
    first = request.offset // BLOCK * BLOCK
    operations = [submit(request)]
    edges: list[tuple[int, np.ndarray]] = []
    for offset in _edges(request.offset, len(data)):
        if expected[(offset - first) // BLOCK]:
            page = _page()
            operations.append(submit(Request("read", request.file, offset, page)))
            edges.append((offset, page))
    return _CheckedRead(request, operations, _Comparison(request, expected, edges, damage))


def summed_write(request: Request, submit: Submit, sums: BlockSums) -> Operation:
    """Start a write, and take note of what it writes.

    Blocks that it writes a part of are read, changed and written before the return; what is beside
    that part is padding, or the caller's to write, too.
    """
    data = _bytes(request.buffer)
    operations: list[Operation] = []
    with sums.turn:
        for offset in _edges(request.offset, len(data)):
            _patch(request, data, offset, submit, sums)
    low, high = _whole(request.offset, len(data))
    if low < high:
        part = data[low - request.offset : high - request.offset]
        sums.forget(low, len(part))
        operations.append(submit(Request("write", request.file, low, part)))
        sums.put(low, sums_of(part))
    return _SummedWrite(request, operations, sums)


def _patch(
    request: Request, data: memoryview, offset: int, submit: Submit, sums: BlockSums
) -> None:
    page = _page()
    submit(Request("read", request.file, offset, page)).result()
    here, there = _common(request.offset, len(data), offset)
    _bytes(page)[there] = data[here]
    sums.forget(offset, BLOCK)
    submit(Request("write", request.file, offset, page)).result()
    sums.put(offset, sums_of(page))


def _whole(offset: int, nbytes: int) -> tuple[int, int]:
    """The first byte and the end of those blocks that lie in a range."""
    return -(-offset // BLOCK) * BLOCK, (offset + nbytes) // BLOCK * BLOCK


def _edges(offset: int, nbytes: int) -> list[int]:
    """The blocks that a range has a part of."""
    stop = offset + nbytes
    ends = {offset // BLOCK * BLOCK} if offset % BLOCK else set()
    if stop % BLOCK:
        ends.add(stop // BLOCK * BLOCK)
    return sorted(ends)


def _common(offset: int, nbytes: int, block: int) -> tuple[slice, slice]:
    """What a range has of a block: where in the range, and where in the block."""
    low, high = max(offset, block), min(offset + nbytes, block + BLOCK)
    return slice(low - offset, high - offset), slice(low - block, high - block)


def _bytes(buffer: Any) -> memoryview:
    return memoryview(buffer).cast("B")


def _page() -> np.ndarray:
    """Memory that direct I/O takes."""
    whole = np.empty(2 * BLOCK, np.uint8)
    start = -whole.ctypes.data % BLOCK
    return whole[start : start + BLOCK]
