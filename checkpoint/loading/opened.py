"""A checkpoint held open for reading pieces of its tensors, as stores and exports do.

Bytes are verified block by block before anybody sees them; the blocks read last are kept, so that
pieces of one block cost one read. Thread-safe.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from aio import Engine, File, Operation
from checkpoint.directory.headers import check_header
from checkpoint.directory.locate import check_data_file, with_current_manifest
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.format.checksum import CRC_BLOCK_BYTES, crc32c
from checkpoint.format.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.format.slices import Shape, flat_first, range_boxes, split_dimension
from checkpoint.tensors.assembly import TensorView
from checkpoint.tensors.sources import ByteSource, tensor_source

_KEPT_BYTES = 64 << 20
_READ_AHEAD = 2
"""Blocks of 16 MiB under way beside the one that is verified: what keeps a disk busy."""
MAX_OPEN_FILES = 64
"""Each takes two descriptors, of which a process often has no more than 1024."""

Block = npt.NDArray[np.uint8]


class _Lock:
    """A lock that a forked child has anew: it has no thread that would let go of the parent's.

    Used as `with lock.here():`, which takes it and lets it go in C. In Python an interrupt could
    come between that and the body, and nobody would let go of it.
    """

    def __init__(self) -> None:
        self._of_process: dict[int, threading.Lock] = {}

    def here(self) -> threading.Lock:
        """The lock of this process."""
        return self._of_process.setdefault(os.getpid(), threading.Lock())


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """A checksum block on its way into memory of its size."""

    record: TensorRecord
    chunk: ChunkRecord
    number: int
    into: Block
    path: Path
    operation: Operation


class OpenCheckpoint:
    """Reads ranges of stored tensors. Closed by `close`, at the end of a `with`, or when forgotten.

    Every data file is there and has the header that the manifest says, or CorruptCheckpointError is
    raised at once. Up to MAX_OPEN_FILES stay readable when another save takes the checkpoint's
    place meanwhile; of more, those used last are kept open and the others opened again.
    """

    def __init__(self, manifest: Manifest, checkpoint: Path, *, verify: bool = True) -> None:
        self.manifest = manifest
        self._checkpoint = checkpoint
        self._verify = verify
        self._engine = Engine(lanes=1)
        self._files: OrderedDict[int, File] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int, int], Block] = OrderedDict()
        self._lock = _Lock()
        self._span: tuple[tuple[str, int, int], Block] | None = None
        self._span_lock = _Lock()
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

    def read(self, record: TensorRecord, start: int, out: memoryview) -> None:
        """Fills `out` with bytes [start, start + len(out)) of a row-major tensor.

        Raises CorruptCheckpointError naming file, tensor and extent, or AioError.
        """
        for chunk in record.chunks:
            first = flat_first(record.shape, chunk.start, chunk.shape)
            if first is None:
                self._read_box(record, chunk, start, out)
                continue
            base = first * record.element.itemsize
            low = max(start, base)
            high = min(start + len(out), base + chunk.nbytes)
            if low < high:
                self._read_chunk(record, chunk, low - base, out[low - start : high - start])

    def _read_chunk(
        self, record: TensorRecord, chunk: ChunkRecord, first: int, out: memoryview
    ) -> None:
        """Fills `out` with the bytes of a chunk from byte `first` on: with blocks that it takes
        whole straight from the file, one being verified while the next one is read.
        """
        under_way: deque[_BlockRead] = deque()
        done = 0
        try:
            while done < len(out):
                number, inside = divmod(first + done, CRC_BLOCK_BYTES)
                nbytes = chunk.block(number)[1]
                part = min(len(out) - done, nbytes - inside)
                target = out[done : done + part]
                if part == nbytes:
                    into = np.frombuffer(target, np.uint8)
                    under_way.append(self._begin(record, chunk, number, into))
                else:
                    target[:] = self._block(record, chunk, number)[inside : inside + part].data
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

    def _read_box(
        self, record: TensorRecord, chunk: ChunkRecord, start: int, out: memoryview
    ) -> None:
        """Fills what a box that is no gapless range has of a byte range of its tensor: of the box
        those rows are read that the range touches.
        """
        axis = split_dimension(record.shape) or 0
        itemsize = record.element.itemsize
        row_bytes = math.prod(record.shape[axis + 1 :]) * itemsize
        first_row = chunk.start[axis]
        low = max(start // row_bytes - first_row, 0)
        high = min(-(-(start + len(out)) // row_bytes) - first_row, chunk.shape[axis])
        chunk_row_bytes = math.prod(chunk.shape[axis + 1 :]) * itemsize
        step = max(CRC_BLOCK_BYTES // max(chunk_row_bytes, 1), 1)
        for row in range(low, high, step):  # a block's worth at a time is in memory
            begin, shape = list(chunk.start), list(chunk.shape)
            begin[axis], shape[axis] = first_row + row, min(step, high - row)
            data = np.empty(shape[axis] * chunk_row_bytes, np.uint8)
            self._read_chunk(record, chunk, row * chunk_row_bytes, data.data)
            box = data.reshape(*shape, itemsize)
            _copy_box((*record.shape, itemsize), (*begin, 0), box, start, out)

    def span(self, record: TensorRecord, first: int, nbytes: int) -> Block:
        """Bytes of a stored tensor in memory of their own. The last ones that were asked for are
        kept: whoever picks elements out of them comes again for the next ones.
        """
        key = (record.name, first, nbytes)
        with self._span_lock.here():
            if self._span is None or self._span[0] != key:
                self._span = None
                data = np.empty(nbytes, np.uint8)
                self.read(record, first, data.data)
                self._span = key, data
            return self._span[1]

    def forget_span(self) -> None:
        """Lets go of what `span` keeps."""
        with self._span_lock.here():
            self._span = None

    def forget_blocks(self) -> None:
        """Lets go of the blocks that were read last."""
        with self._lock.here():
            self._blocks.clear()

    def _block(self, record: TensorRecord, chunk: ChunkRecord, number: int) -> Block:
        key = (chunk.file, chunk.offset, number)
        with self._lock.here():
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        block = self._read_block(record, chunk, number)
        with self._lock.here():
            self._blocks[key] = block
            while sum(map(len, self._blocks.values())) > _KEPT_BYTES:
                self._blocks.popitem(last=False)
        return block

    def _read_block(self, record: TensorRecord, chunk: ChunkRecord, number: int) -> Block:
        block = np.empty(chunk.block(number)[1], np.uint8)
        self._finish(self._begin(record, chunk, number, block))
        return block

    def _begin(
        self, record: TensorRecord, chunk: ChunkRecord, number: int, into: Block
    ) -> _BlockRead:
        """Begins to read a block into memory of its size."""
        with self._lock.here():  # until it is in flight the file could be closed for another one
            file = self._file(chunk.file)
            first = chunk.offset + chunk.block(number)[0]
            operation = self._engine.read(file, first, into)
        return _BlockRead(record, chunk, number, into, file.path, operation)

    def _finish(self, read: _BlockRead) -> None:
        """Waits for a block and verifies it."""
        read.operation.result()
        if self._verify:
            expected, found = read.chunk.crc32c[read.number], crc32c(read.into)
            if found != expected:
                raise read.chunk.wrong_sum(
                    read.number, found, path=read.path, tensor=read.record.name
                )

    def _file(self, number: int) -> File:
        """An open data file, the one that was saved. The caller holds the lock."""
        file = self._files.get(number)
        if file is None:
            while len(self._files) >= MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            record = self.manifest.files[number]
            path = check_data_file(self.manifest, self._checkpoint, record)
            file = self._files[number] = self._engine.open(path)
            file.leave_open()  # C closes it, wherever this is forgotten
            check_header(self._engine, file, record)
        self._files.move_to_end(number)
        return file

    def source(self, view: TensorView) -> ByteSource:
        """A leaf of the checkpoint as a byte source, verified as it is read."""
        record = self.manifest.tensors[view.index]
        if view.is_row_major:
            return _StoredRange(self, record, view.offset, view.dtype, view.shape)
        return _PickedView(self, record, view, view.dtype, view.shape)

    def close(self) -> None:
        """Closes the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._engine.close()
        self._blocks.clear()
        self._span = None

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_current(
    checkpoint: Path, moved: Relocation = AS_SAVED, *, verify: bool = True
) -> OpenCheckpoint:
    """Opens what is at a path, also where saves take its place meanwhile.

    Raises what `read_manifest` and `OpenCheckpoint` do.
    """

    def attempt(manifest: Manifest) -> OpenCheckpoint:
        return OpenCheckpoint(manifest, checkpoint, verify=verify)

    return with_current_manifest(checkpoint, attempt, moved)


def _copy_box(whole: Shape, begin: Shape, box: Block, start: int, out: memoryview) -> None:
    """Copies what a box at `begin` has of elements [start, start + len(out)) of a row-major array
    of bytes.
    """
    target = np.frombuffer(out, np.uint8)
    done = 0
    for slices, shape in range_boxes(whole, start, start + len(out)):
        count = math.prod(shape)
        lows = [max(part.start, low) for part, low in zip(slices, begin, strict=True)]
        highs = [
            min(part.stop, low + size)
            for part, low, size in zip(slices, begin, box.shape, strict=True)
        ]
        if all(low < high for low, high in zip(lows, highs, strict=True)):
            origins = [part.start for part in slices]
            piece = target[done : done + count].reshape(shape)
            piece[_slices(lows, highs, origins)] = box[_slices(lows, highs, begin)]
        done += count


def _slices(lows: Sequence[int], highs: Sequence[int], origins: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(low - origin, high - origin)
        for low, high, origin in zip(lows, highs, origins, strict=True)
    )


@dataclass(slots=True)
class _StoredRange:
    """The bytes of a stored tensor from `offset` on."""

    opened: OpenCheckpoint
    record: TensorRecord
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True

    def read(self, start: int, out: memoryview) -> None:
        self.opened.read(self.record, self.offset + start, out)


@dataclass(slots=True)
class _PickedView:
    """Elements that lie apart in another tensor, in memory with what lies between them from the
    first read of them to that of the last one, or of another such view.
    """

    opened: OpenCheckpoint
    record: TensorRecord
    view: TensorView
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True

    def read(self, start: int, out: memoryview) -> None:
        span = self.opened.span(self.record, self.view.offset, self.view.reach_bytes)
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        storage = torch.from_numpy(span).untyped_storage()
        source = tensor_source(empty.set_(storage, 0, self.shape, self.view.strides or ()))
        assert source.read is not None
        source.read(start, out)
        if start + len(out) == source.nbytes:
            self.opened.forget_span()
