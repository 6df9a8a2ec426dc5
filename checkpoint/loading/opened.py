"""A checkpoint held open for reading pieces of its tensors, as stores and exports do.

Bytes are verified block by block before anybody sees them; the blocks read last are kept, so that
pieces of one block cost one read. Damage is noted, so that no manager counts the checkpoint as one
that is kept. Thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from checkpoint.directory.locate import with_current_manifest
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.format.slices import (
    Shape,
    contiguous_strides,
    flat_first,
    in_bytes,
    may_overlap_itself,
    offset_of,
    place_in,
    range_boxes,
    shared_box,
    span_elements,
)
from checkpoint.known.damage import damage_noted, note_error
from checkpoint.loading.chunks import MAX_OPEN_FILES, ChunkReader, ForkedLock
from checkpoint.plan.windows import goes_forward, windows
from checkpoint.tensors.assembly import TensorView
from checkpoint.tensors.sources import ByteSource, integer_view, tensor_source
from checkpoint.transfer.kept_blocks import Block

KEPT_BYTES = 64 << 20
"""Of blocks that were read last, in memory."""


class OpenCheckpoint(ChunkReader):
    """Reads ranges of stored tensors. Closed by `close`, at the end of a `with`, or when forgotten.

    Every data file is there and has the header that the manifest says, or CorruptCheckpointError is
    raised at once. Up to MAX_OPEN_FILES stay readable when another save takes the checkpoint's
    place meanwhile; of more, those used last are kept open and the others opened again.
    """

    def __init__(
        self,
        manifest: Manifest,
        checkpoint: Path,
        *,
        verify: bool = True,
        kept_bytes: int | None = None,
        most_kept_bytes: int = 0,
    ) -> None:
        """In memory are `kept_bytes` (KEPT_BYTES) of blocks that were read last, and up to
        `most_kept_bytes` where that many lie side by side in a tensor.
        """
        beside = _blocks_beside(manifest.tensors) * CRC_BLOCK_BYTES
        kept_bytes = KEPT_BYTES if kept_bytes is None else kept_bytes
        kept_bytes = max(kept_bytes, min(beside, most_kept_bytes))
        self._span: tuple[tuple[str, int, int], Block] | None = None
        self._unpicked = 0
        self._span_lock = ForkedLock(checkpoint)
        super().__init__(manifest, checkpoint, verify=verify, kept_bytes=kept_bytes)
        numbers = range(len(manifest.files))
        # Of more, what is read is what is at the path by then.
        kept = numbers if len(numbers) <= MAX_OPEN_FILES else ()
        self._opened = {number: _identity(self._path_of(number)) for number in kept}
        """What tells the data files that are kept open from those that take their places."""

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
                self.read_chunk(record, chunk, low - base, out[low - start : high - start])

    def read_chunk(
        self, record: TensorRecord, chunk: ChunkRecord, first: int, out: memoryview
    ) -> None:
        """As of `ChunkReader`; what is found of damage is noted."""
        try:
            super().read_chunk(record, chunk, first, out)
        except (CorruptCheckpointError, OSError) as error:
            self._note(chunk.file, error)
            raise

    def read_part(
        self, record: TensorRecord, chunk: ChunkRecord, whole: Shape, start: Shape, out: Block
    ) -> None:
        """As of `ChunkReader`; what is found of damage is noted."""
        try:
            super().read_part(record, chunk, whole, start, out)
        except (CorruptCheckpointError, OSError) as error:
            self._note(chunk.file, error)
            raise

    def _note(self, file: int, error: CorruptCheckpointError | OSError) -> None:
        """Of a data file, unless another one has taken its place, from a backup as a rule."""
        if self._opened.get(file) in (None, _identity(self._path_of(file))):
            note_error(self.path, self.manifest, error)

    def _path_of(self, file: int) -> Path:
        return self.manifest.file_path(self.path, self.manifest.files[file])

    def _read_box(
        self, record: TensorRecord, chunk: ChunkRecord, start: int, out: memoryview
    ) -> None:
        """Fills what a box that is no gapless range has of a byte range of its tensor."""
        itemsize = record.element.itemsize
        whole, begin, shape = in_bytes(record.shape, chunk.start, chunk.shape, itemsize)
        strides = contiguous_strides(whole)
        first = offset_of(begin, strides)
        if start >= first + span_elements(shape, strides) or first >= start + len(out):
            return
        target = np.frombuffer(out, np.uint8)
        done = 0
        for slices, part in range_boxes(whole, start, start + len(out)):
            origin = tuple(one.start for one in slices)
            shared = shared_box(origin, part, begin, shape)
            end = done + math.prod(part)
            if shared is not None:
                piece = target[done:end].reshape(part)[place_in(origin, shared)]
                self.read_part(record, chunk, shape, _minus(shared[0], begin), piece)
            done = end

    def read_leaf(self, view: TensorView, start: Shape, values: torch.Tensor) -> None:
        """Fills `values`, contiguous memory of the leaf's dtype, with the box at `start` of a leaf.
        The blocks that it touches are read, each once where they lie in a row.

        Raises what `read` does.
        """
        record, shape = self.manifest.tensors[view.tensor], tuple(values.shape)
        strides = contiguous_strides(view.shape) if view.strides is None else view.strides
        itemsize = view.dtype.itemsize
        if view.is_row_major:
            strides = contiguous_strides(view.shape)
            first = flat_first(view.shape, start, shape)
            if first is not None:
                raw = values.reshape(-1).view(torch.uint8).numpy()
                self.read(record, view.offset + first * itemsize, raw.data)
                return
            if view.shape == record.shape and itemsize == record.element.itemsize:
                self._read_stored(record, start, values)
                return
        first_byte = view.offset + offset_of(start, strides) * itemsize
        self._read_strided(record, first_byte, strides, values)

    def _read_stored(self, record: TensorRecord, start: Shape, values: torch.Tensor) -> None:
        """`read_leaf` of all that is a stored tensor, whose chunks may be boxes. With a dimension
        at the least, of bytes from here on.
        """
        itemsize = record.element.itemsize
        out = values.view(torch.uint8).numpy()
        begin = _of_bytes(start, itemsize)
        for chunk in record.chunks:
            low, size = _of_bytes(chunk.start, itemsize), _of_bytes(chunk.shape, itemsize)
            shared = shared_box(begin, out.shape, low, size)
            if shared is not None:
                piece = out[place_in(begin, shared)]
                self.read_part(record, chunk, size, _minus(shared[0], low), piece)

    def _read_strided(
        self, record: TensorRecord, first: int, strides: Shape, values: torch.Tensor
    ) -> None:
        """Fills `values` with elements of these strides from byte `first` of a stored tensor on. In
        memory is a block's length of what they reach over, or all where elements overlap.
        """
        itemsize = values.element_size()
        empty = torch.empty(0, dtype=values.dtype, device="cpu")
        for start, shape in windows(tuple(values.shape), strides, CRC_BLOCK_BYTES // itemsize):
            raw = np.empty(span_elements(shape, strides) * itemsize, np.uint8)
            self.read(record, first + offset_of(start, strides) * itemsize, raw.data)
            found = empty.set_(torch.from_numpy(raw).untyped_storage(), 0, shape, strides)
            place = place_in((0,) * len(shape), (start, shape))
            integer_view(values)[place].copy_(integer_view(found))

    def span(self, record: TensorRecord, first: int, nbytes: int, wanted: int) -> Block:
        """Bytes of a stored tensor in memory of their own. The last ones that were asked for are
        kept until so many are ``picked`` out of them: whoever does comes again for the next ones.
        """
        key = (record.name, first, nbytes)
        with self._span_lock.here():
            if self._span is None or self._span[0] != key:
                self._span = None
                data = np.empty(nbytes, np.uint8)
                self.read(record, first, data.data)
                self._span, self._unpicked = (key, data), wanted
            return self._span[1]

    def picked(self, nbytes: int) -> None:
        """So many bytes were picked out of what `span` gave, in whatever order."""
        with self._span_lock.here():
            self._unpicked -= nbytes
            if self._unpicked <= 0:
                self._span = None

    def source(self, view: TensorView) -> ByteSource:
        """A leaf of the checkpoint as a byte source, verified as it is read."""
        record = self.manifest.tensors[view.tensor]
        if view.is_row_major:
            return _StoredRange(self, record, view.dtype, view.shape, view.offset)
        return _PickedView(self, record, view.dtype, view.shape, view)

    def close(self) -> None:
        """Closes the files. Idempotent."""
        super().close()
        self._span = None

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_current(
    checkpoint: Path,
    moved: Relocation = AS_SAVED,
    *,
    verify: bool = True,
    kept_bytes: int | None = None,
    most_kept_bytes: int = 0,
) -> OpenCheckpoint:
    """Opens what is at a path, also where saves take its place meanwhile.

    Raises what `read_manifest` and `OpenCheckpoint` do.
    """

    def attempt(manifest: Manifest) -> OpenCheckpoint:
        return OpenCheckpoint(
            manifest,
            checkpoint,
            verify=verify,
            kept_bytes=kept_bytes,
            most_kept_bytes=most_kept_bytes,
        )

    with damage_noted(checkpoint) as read:
        return with_current_manifest(checkpoint, read.by(attempt), moved)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode number of a file; None where that cannot be told."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _blocks_beside(tensors: Iterable[TensorRecord]) -> int:
    """Of how many blocks a range of a tensor may have something, where its chunks are boxes."""
    return max((_beside(record) for record in tensors if len(record.chunks) > 1), default=0)


def _beside(record: TensorRecord) -> int:
    boxes = [
        chunk.start[1:]
        for chunk in record.chunks
        if flat_first(record.shape, chunk.start, chunk.shape) is None
    ]
    return len(set(boxes)) + 1 if boxes else 0


def _minus(one: Shape, other: Shape) -> Shape:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _of_bytes(sizes: Shape, itemsize: int) -> Shape:
    return (*sizes[:-1], sizes[-1] * itemsize)


@dataclass(slots=True)
class _Stored:
    """A part of a stored tensor, as a tensor of this dtype and shape."""

    opened: OpenCheckpoint
    record: TensorRecord
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True


@dataclass(slots=True)
class _StoredRange(_Stored):
    """The bytes of a stored tensor from `offset` on."""

    offset: int

    def read(self, start: int, out: memoryview) -> None:
        self.opened.read(self.record, self.offset + start, out)


@dataclass(slots=True)
class _PickedView(_Stored):
    """Elements that lie apart in another tensor. Where they do not lie in their order, they are in
    memory with what lies between them from the first read of them to that of the last one.
    """

    view: TensorView

    def read(self, start: int, out: memoryview) -> None:
        itemsize, strides = self.dtype.itemsize, self.view.strides or ()
        is_whole = len(out) == math.prod(self.shape) * itemsize
        is_once = is_whole and not may_overlap_itself(self.shape, strides)
        is_ragged = start % itemsize or len(out) % itemsize
        if not is_ragged and (is_once or goes_forward(self.shape, strides)):
            self._pick(start // itemsize, out)
        else:
            self._pick_from_memory(start, out)

    def _pick(self, first: int, out: memoryview) -> None:
        """Reads elements from number `first` on."""
        flat = torch.frombuffer(out, dtype=torch.uint8).view(self.dtype)
        done = 0
        for slices, shape in range_boxes(self.shape, first, first + flat.numel()):
            end = done + math.prod(shape)
            start = tuple(one.start for one in slices)
            self.opened.read_leaf(self.view, start, flat[done:end].view(shape))
            done = end

    def _pick_from_memory(self, start: int, out: memoryview) -> None:
        wanted = math.prod(self.shape) * self.dtype.itemsize
        span = self.opened.span(self.record, self.view.offset, self.view.reach_bytes, wanted)
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        storage = torch.from_numpy(span).untyped_storage()
        source = tensor_source(empty.set_(storage, 0, self.shape, self.view.strides or ()))
        assert source.read is not None
        source.read(start, out)
        self.opened.picked(len(out))
