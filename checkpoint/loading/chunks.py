"""Bytes of the chunks of a checkpoint that is held open, verified block by block, or by grains
where a chunk has them and a block is wanted in part.

What was read last is kept, so that pieces of one block, or grain, cost one read. Thread-safe.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aio import Engine, File, Operation
from checkpoint.directory.headers import check_header, wait_for_read
from checkpoint.directory.locate import check_data_file, check_still_there
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES, block_crcs, crc32c
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.format.slices import (
    Shape,
    Slices,
    box_ranges,
    contiguous_strides,
    flat_first,
    offset_of,
    place_in,
    range_boxes,
    shared_box,
    span_elements,
)
from checkpoint.transfer.kept_blocks import Block, KeptBlock, KeptBlocks, sparse_memory

_READ_AHEAD = 2
_FEW = 4
"""Blocks of 16 MiB under way beside the one that is verified: what keeps a disk busy."""
MIN_STRAIGHT_BYTES = 1 << 20
"""Grains of which so much is wanted are read to where they belong, and not kept."""
MAX_OPEN_FILES = 64
"""Each takes two descriptors, of which a process often has no more than 1024."""


class ForkedLock:
    """A lock that a forked child has anew: it has no thread that would let go of the parent's.

    Used as `with lock.here():`, which takes it and lets it go in C. In Python an interrupt could
    come between that and the body, and nobody would let go of it.
    """

    def __init__(self, path: Path) -> None:
        """Of the checkpoint at a path."""
        self._path = path
        self._of_process: dict[int, threading.RLock] = {}

    def here(self) -> threading.RLock:
        """The lock of this process. Raises RuntimeError where this thread has it, by what a handler
        of a signal has interrupted: that is half-way through a change, and goes on behind it.
        """
        lock = self._of_process.setdefault(os.getpid(), threading.RLock())
        if lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self._path} is read in a handler of a signal (or a finalizer) that has come in "
                "the midst of a read of the same open checkpoint on this thread; open it anew "
                "there, or set a flag and read it later"
            )
        return lock


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """A checksum block, or bytes of it from `first` on, on its way into memory of its size."""

    record: TensorRecord
    chunk: ChunkRecord
    number: int
    first: int
    into: Block
    path: Path
    operation: Operation

    def wait(self) -> None:
        """Until it has come. Raises CorruptCheckpointError where the file ends before it does."""
        wait_for_read(self.operation, lambda _: self.record.name)


class ChunkReader:
    """Reads bytes of chunks. Its files are closed by `close`, or when it is forgotten.

    `kept_bytes` is what blocks that were read last may take in memory.
    """

    def __init__(
        self, manifest: Manifest, checkpoint: Path, *, verify: bool, kept_bytes: int
    ) -> None:
        self.manifest = manifest
        self._checkpoint = checkpoint
        self._verify = verify
        self._engine = Engine(lanes=1)
        self._files: OrderedDict[int, File] = OrderedDict()
        self._blocks = KeptBlocks(kept_bytes)
        self._lock = ForkedLock(checkpoint)
        self._pid = os.getpid()
        try:
            for number in range(len(manifest.files)):
                self._file(number)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Of the checkpoint."""
        return self._checkpoint

    def read_chunk(
        self, record: TensorRecord, chunk: ChunkRecord, first: int, out: memoryview
    ) -> None:
        """Fills `out` with the bytes of a chunk from byte `first` on: with blocks that it takes
        whole, and many grains, straight from the file, one read being verified during the next.
        """
        under_way: deque[_BlockRead] = deque()
        done = 0
        try:
            while done < len(out):
                number, inside = divmod(first + done, CRC_BLOCK_BYTES)
                part, is_straight = _next_part(chunk, number, inside, len(out) - done)
                target = out[done : done + part]
                if is_straight:
                    into = np.frombuffer(target, np.uint8)
                    under_way.append(self._begin(record, chunk, number, into, inside))
                else:
                    block = self._block(record, chunk, number, [(inside, inside + part)])
                    target[:] = block[inside : inside + part].data
                while len(under_way) > _READ_AHEAD:
                    self._finish(under_way[0])
                    under_way.popleft()
                done += part
            while under_way:
                self._finish(under_way[0])
                under_way.popleft()
        except BaseException:
            for read in under_way:
                read.operation.abandon()
            raise

    def read_part(
        self, record: TensorRecord, chunk: ChunkRecord, whole: Shape, start: Shape, out: Block
    ) -> None:
        """Fills `out` with the box at `start` of a chunk that is row-major bytes of shape `whole`,
        of blocks, or grains, that have something of it.
        """
        first = flat_first(whole, start, out.shape)
        if first is not None and out.flags.c_contiguous:
            self.read_chunk(record, chunk, first, out.reshape(-1).data)
            return
        strides = contiguous_strides(whole)
        first = offset_of(start, strides)
        last = first + span_elements(out.shape, strides)
        for number in range(first // CRC_BLOCK_BYTES, -(-last // CRC_BLOCK_BYTES)):
            base, nbytes = chunk.block(number)
            low, high = max(first, base), min(last, base + nbytes)
            parts = list(_parts(whole, low, high, start, out.shape))
            if parts:
                ranges = [
                    (first - base, last - base) for part in parts for first, last in part.ranges
                ]
                block = self._block(record, chunk, number, ranges)
                for part in parts:
                    data = block[part.first - base : part.last - base].reshape(part.shape)
                    out[part.place] = data[part.inside]

    def keep_little(self) -> None:
        """Keeps no more than a few parts that have a checksum, at most a block: for whoever reads
        tensors from one end to the other, several pieces at a time.
        """
        chunks = (chunk for record in self.manifest.tensors for chunk in record.chunks)
        largest = max((min(chunk.nbytes, chunk.unit_nbytes) for chunk in chunks), default=0)
        with self._lock.here():
            self._blocks.limit_bytes = min(_FEW * largest, CRC_BLOCK_BYTES)

    def forget_blocks(self) -> None:
        """Lets go of the blocks that were read last."""
        with self._lock.here():
            self._blocks.clear()

    def _block(
        self,
        record: TensorRecord,
        chunk: ChunkRecord,
        number: int,
        ranges: Sequence[tuple[int, int]],
    ) -> Block:
        """A block in whose memory bytes [low, high) of these ranges are there, and verified."""
        key = (chunk.file, chunk.offset, number)
        with self._lock.here():
            block = self._blocks.find(key, chunk.block(number)[1])
            if block is None:
                block = self._unread(chunk, number)
            missing = [] if block is None else block.missing(ranges)
        if block is None:
            memory = np.empty(chunk.block(number)[1], np.uint8)
            self._finish(self._begin(record, chunk, number, memory))
            block = KeptBlock(memory)
        found = self._units(record, chunk, number, block, missing)
        with self._lock.here():
            for first, data in found:
                block.fill(first, data)
            self._blocks.keep(key, block)
        return block.memory

    def _unread(self, chunk: ChunkRecord, number: int) -> KeptBlock | None:
        """A block of which nothing was read; None if it has to be read as a whole."""
        first, nbytes = chunk.block(number)
        unit = chunk.grain_nbytes
        if unit:
            sums = chunk.unit_sums(unit, first // unit, -(-(first + nbytes) // unit))
            return KeptBlock(sparse_memory(nbytes), sums, unit)
        if not self._verify:
            return KeptBlock(sparse_memory(nbytes), np.empty(0, np.uint32), ALIGNMENT)
        return None

    def _units(
        self,
        record: TensorRecord,
        chunk: ChunkRecord,
        number: int,
        block: KeptBlock,
        runs: Sequence[tuple[int, int]],
    ) -> list[tuple[int, Block]]:
        """Runs [first, last) of units of a block, each with the number of its first one; verified,
        as their sums are known.
        """
        under_way: deque[_BlockRead] = deque()
        found: list[tuple[int, Block]] = []
        try:
            for first, last in runs:
                low, high = block.unit(first).start, block.unit(last - 1).stop
                into = np.empty(high - low, np.uint8)
                under_way.append(self._begin(record, chunk, number, into, low))
            for first, _ in runs:
                under_way[0].wait()
                read = under_way.popleft()
                if self._verify:
                    self._check_units(read, block, first)
                found.append((first, read.into))
        except BaseException:
            for read in under_way:
                read.operation.abandon()
            raise
        return found

    def _check_units(self, read: _BlockRead, block: KeptBlock, first: int) -> None:
        """Raises CorruptCheckpointError for units from number `first` on with other sums."""
        if read.chunk.grain_nbytes:
            _check_grains(read)
            return
        sums = block_crcs(read.into, block.unit_bytes)
        expected = block.unit_sums()[first : first + len(sums)]
        if np.array_equal(sums, expected):
            return
        chunk, wrong = read.chunk, int(np.flatnonzero(sums != expected)[0])
        begin, place = chunk.block(read.number)[0], block.unit(first + wrong)
        raise CorruptCheckpointError(
            f"the CRC-32C of these bytes is {sums[wrong]:08x}, and was {expected[wrong]:08x} when "
            "they were read before",
            path=read.path,
            tensor=read.record.name,
            offset=chunk.offset + begin + place.start,
            nbytes=place.stop - place.start,
        )

    def _begin(
        self, record: TensorRecord, chunk: ChunkRecord, number: int, into: Block, first: int = 0
    ) -> _BlockRead:
        """Begins to read a block, or part of it, into memory of its size."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._checkpoint} was opened in process {self._pid} and cannot be read in "
                f"{os.getpid()}, which was forked from it; open it again there"
            )
        with self._lock.here():  # until it is in flight the file could be closed for another one
            file = self._file(chunk.file)
            offset = chunk.offset + chunk.block(number)[0] + first
            operation = self._engine.read(file, offset, into)
        return _BlockRead(record, chunk, number, first, into, file.path, operation)

    def _finish(self, read: _BlockRead) -> None:
        """Waits for a block, or grains of one, and verifies it."""
        read.wait()
        if self._verify and len(read.into) < read.chunk.block(read.number)[1]:
            _check_grains(read)
        elif self._verify:
            expected, found = read.chunk.crc32c[read.number], crc32c(read.into)
            if found != expected:
                raise read.chunk.wrong_sum(
                    read.number, found, path=read.path, tensor=read.record.name
                )

    def _file(self, number: int) -> File:
        """An open data file, the one that was saved. The caller holds the lock. Raises
        FileNotFoundError where it went with its save.
        """
        file = self._files.get(number)
        if file is None:
            while len(self._files) >= MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            record = self.manifest.files[number]
            try:
                path = check_data_file(self.manifest, self._checkpoint, record)
                file = self._engine.open(path)
            except (FileNotFoundError, CorruptCheckpointError):
                check_still_there(self.manifest, self._checkpoint)
                raise
            file.leave_open()  # C closes it, wherever this is forgotten
            try:
                check_header(self._engine, file, record)
            except BaseException:
                file.close()
                raise
            self._files[number] = file  # not before: the next read would take it for the right one
        self._files.move_to_end(number)
        return file

    def close(self) -> None:
        """Closes the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._engine.close()
        self._blocks.clear()


def _check_grains(read: _BlockRead) -> None:
    """Raises CorruptCheckpointError for the first of the grains that were read that has another sum
    than the manifest says.
    """
    unit = read.chunk.grain_nbytes
    first = (read.chunk.block(read.number)[0] + read.first) // unit
    sums = block_crcs(read.into, unit)
    wrong = np.flatnonzero(sums != read.chunk.unit_sums(unit, first, first + len(sums)))
    if len(wrong):
        number, crc = first + int(wrong[0]), int(sums[wrong[0]])
        raise read.chunk.wrong_unit_sum(unit, number, crc, path=read.path, tensor=read.record.name)


def _next_part(chunk: ChunkRecord, number: int, inside: int, most: int) -> tuple[int, bool]:
    """How many bytes of a block from byte `inside` on, and `most` of them, to take at a time, and
    whether straight to where they belong: all of a block, or so many whole grains of it.
    """
    nbytes, grain = chunk.block(number)[1], chunk.grain_nbytes
    last = min(inside + most, nbytes)
    part = last - inside
    if part == nbytes:
        return part, True
    if not grain or part < MIN_STRAIGHT_BYTES + 2 * grain:
        return part, False
    if inside % grain:
        return grain - inside % grain, False
    return (part if last == nbytes else last // grain * grain - inside), True


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [first, last) of a chunk, a box of `shape`, of which those at `inside`, in `ranges`, go
    to `place`.
    """

    first: int
    last: int
    shape: Shape
    ranges: list[tuple[int, int]]
    inside: Slices
    place: Slices


def _parts(whole: Shape, first: int, last: int, start: Shape, wanted: Shape) -> Iterator[_Part]:
    """What bytes [first, last) of a chunk, row-major of shape `whole`, have of the box `wanted` at
    `start`.
    """
    for slices, shape in range_boxes(whole, first, last):
        end = first + math.prod(shape)
        origin = tuple(one.start for one in slices)
        shared = shared_box(origin, shape, start, wanted)
        if shared is not None:
            inside = place_in(origin, shared)
            begin = tuple(one.start for one in inside)
            ranges = [
                (first + low, first + high)
                for low, high in box_ranges(shape, begin, shared[1], ALIGNMENT - 1)
            ]
            yield _Part(first, end, shape, ranges, inside, place_in(start, shared))
        first = end
