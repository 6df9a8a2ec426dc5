"""A checkpoint held open for reading pieces of its tensors, as stores and exports do.

Bytes are verified block by block before anybody sees them; the blocks read last are kept, so that
pieces of one block cost one read. Thread-safe.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from aio import Engine, File
from checkpoint.directory.headers import check_header
from checkpoint.directory.locate import check_data_file, with_current_manifest
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES, crc32c
from checkpoint.format.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.format.slices import flat_first, span_elements
from checkpoint.tensors.assembly import TensorView
from checkpoint.tensors.sources import ByteSource, tensor_source

_KEPT_BYTES = 64 << 20
MAX_OPEN_FILES = 64
"""Each takes two descriptors, of which a process often has no more than 1024."""

Block = npt.NDArray[np.uint8]


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
        self._closed = weakref.finalize(self, _close, self._files, self._engine)
        self._lock = threading.Lock()
        try:
            for number in range(len(manifest.files)):
                self._file(number)
        except BaseException:
            self.close()
            raise

    def read(self, record: TensorRecord, start: int, out: memoryview) -> None:
        """Fills `out` with bytes [start, start + len(out)) of a row-major tensor.

        Raises CorruptCheckpointError naming file, tensor and extent, or AioError.
        """
        for chunk in record.chunks:
            first = flat_first(record.shape, chunk.start, chunk.shape)
            if first is None:
                _copy_box(record, chunk, self._whole(record, chunk), start, out)
                continue
            base = first * record.element.itemsize
            low = max(start, base)
            high = min(start + len(out), base + chunk.nbytes)
            while low < high:
                number, inside = divmod(low - base, CRC_BLOCK_BYTES)
                block = self._block(record, chunk, number)
                part = min(high - low, len(block) - inside)
                out[low - start : low - start + part] = block[inside : inside + part].data
                low += part

    def _whole(self, record: TensorRecord, chunk: ChunkRecord) -> Block:
        blocks = [self._block(record, chunk, number) for number in range(len(chunk.crc32c))]
        return np.concatenate([np.empty(0, np.uint8), *blocks])

    def _block(self, record: TensorRecord, chunk: ChunkRecord, number: int) -> Block:
        key = (chunk.file, chunk.offset, number)
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        block = self._read_block(record, chunk, number)
        with self._lock:
            self._blocks[key] = block
            while sum(map(len, self._blocks.values())) > _KEPT_BYTES:
                self._blocks.popitem(last=False)
        return block

    def _read_block(self, record: TensorRecord, chunk: ChunkRecord, number: int) -> Block:
        first, nbytes = chunk.block(number)
        block = np.empty(nbytes, np.uint8)
        with self._lock:  # until it is in flight the file could be closed for another one
            file = self._file(chunk.file)
            operation = self._engine.read(file, chunk.offset + first, block)
        operation.result()
        found = crc32c(block) if self._verify else chunk.crc32c[number]
        if found != chunk.crc32c[number]:
            raise CorruptCheckpointError(
                f"the CRC-32C of these bytes is {found:08x}, the manifest says "
                f"{chunk.crc32c[number]:08x}",
                path=file.path,
                tensor=record.name,
                offset=chunk.offset + first,
                nbytes=nbytes,
            )
        return block

    def _file(self, number: int) -> File:
        """An open data file, the one that was saved. The caller holds the lock."""
        file = self._files.get(number)
        if file is None:
            while len(self._files) >= MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            record = self.manifest.files[number]
            path = check_data_file(self.manifest, self._checkpoint, record)
            file = self._files[number] = self._engine.open(path)
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
        self._closed()
        self._blocks.clear()

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


def _close(files: OrderedDict[int, File], engine: Engine) -> None:
    for file in files.values():
        file.close()
    engine.close()


def _copy_box(
    record: TensorRecord, chunk: ChunkRecord, data: Block, start: int, out: memoryview
) -> None:
    """Copies what a box that is no gapless range has of a byte range of its tensor."""
    itemsize = record.element.itemsize
    last = start + len(out)
    elements = np.arange(chunk.nbytes // itemsize).reshape(chunk.shape)
    index = np.unravel_index(elements.reshape(-1), chunk.shape)
    moved = tuple(axis + low for axis, low in zip(index, chunk.start, strict=True))
    places = np.ravel_multi_index(moved, record.shape) * itemsize
    target = np.frombuffer(out, np.uint8)
    for byte in range(itemsize):
        at = places + byte
        mine = (at >= start) & (at < last)
        target[at[mine] - start] = data[byte::itemsize][mine]


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
    """Elements that lie apart in another tensor; each read reads what lies between them too."""

    opened: OpenCheckpoint
    record: TensorRecord
    view: TensorView
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True

    def read(self, start: int, out: memoryview) -> None:
        strides = self.view.strides or ()
        nbytes = span_elements(self.shape, strides) * self.dtype.itemsize
        span = np.empty(nbytes, np.uint8)
        self.opened.read(self.record, self.view.offset, span.data)
        empty = torch.empty(0, dtype=self.dtype)
        storage = torch.from_numpy(span).untyped_storage()
        source = tensor_source(empty.set_(storage, 0, self.shape, strides))
        assert source.read is not None
        source.read(start, out)
