"""What the fields of a manifest must say about each other before anything is read by them. No I/O.

After `validate`: paths stay inside their roots; extents fill their files, aligned, one after
the other; chunks tile their tensor; every checksum block has its checksum; layouts in memory lie in
their storages, which are not larger than what fills them warrants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from aio.process.absence import is_name
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.bulk.columns import (
    ChunkColumns,
    Column,
    chunk_columns,
    is_grained,
    unclear_tensors,
)
from checkpoint.format.bulk.overlaps import have_overlap
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT, MAX_HEADER_BYTES, align_up
from checkpoint.format.records import (
    MAX_CHUNKS,
    MAX_DIMENSIONS,
    MAX_SIZE,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
)
from checkpoint.format.slices import is_dense, span_elements

_UUID = re.compile("[0-9a-f]{8}")
_DATA_FILE = re.compile(r"r(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})\.safetensors")
_MAX_SPREAD = 4096


def is_uuid(text: str) -> bool:
    """Whether a text can be the id of a save."""
    return _UUID.fullmatch(text) is not None


def is_data_file_name(text: str) -> bool:
    """Whether a text is `r<rank>-<stripe>.safetensors`."""
    return _DATA_FILE.fullmatch(text) is not None


def validate(manifest: Manifest) -> None:
    """Raises CorruptCheckpointError for the first contradiction."""
    if not is_uuid(manifest.uuid):
        raise CorruptCheckpointError(f"uuid {manifest.uuid[:40]!r} is not eight hex digits")
    _check_number("world_size", manifest.world_size, low=1)
    _check_number("saved", manifest.saved, low=0)
    for root in manifest.roots:
        _check_root(root)
    for file in manifest.files:
        _check_file(manifest, file)
    _check_unique([(file.root, file.path) for file in manifest.files], "file")
    _check_unique([tensor.name for tensor in manifest.tensors], "tensor")
    columns = chunk_columns(manifest.tensors)
    for index in unclear_tensors(manifest.files, manifest.tensors, columns):
        _check_tensor(manifest, manifest.tensors[index])
    _check_extents(manifest, columns)
    _check_storages(manifest)


def _check_number(what: str, value: int, low: int) -> None:
    if not low <= value <= MAX_SIZE:
        raise CorruptCheckpointError(f"{what} {value} is not between {low} and {MAX_SIZE}")


def _check_unique(names: Sequence[object], what: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise CorruptCheckpointError(f"{what} {str(name)[:200]!r} is there twice")
        seen.add(name)


def _check_root(root: str) -> None:
    parts = PurePosixPath(root).parts
    if not root.startswith("/") or ".." in parts or not is_name(root):
        raise CorruptCheckpointError(f"root {root[:200]!r} is not an absolute path without '..'")


def _check_file(manifest: Manifest, file: FileRecord) -> None:
    """Data files have names of one form, in a folder that the save made: none leads astray."""
    if file.root is not None and file.root >= len(manifest.roots):
        raise CorruptCheckpointError(f"root {file.root} of {len(manifest.roots)}", path=file.path)
    folder, _, name = file.path.rpartition("/")
    stem, dot, uuid = folder.rpartition(".")
    if file.root is None:
        folder_fits = folder == manifest.uuid
    else:
        folder_fits = bool(dot) and uuid == manifest.uuid and "/" not in stem and is_name(stem)
    if not folder_fits or not is_data_file_name(name):
        raise CorruptCheckpointError(f"{file.path[:200]!r} is not the path of a data file")
    header = file.header_nbytes
    if header % ALIGNMENT or not 0 < header <= min(file.nbytes, MAX_HEADER_BYTES + ALIGNMENT):
        raise CorruptCheckpointError(
            f"a header of {header} bytes in a file of {file.nbytes}", path=file.path
        )
    if file.nbytes % ALIGNMENT:
        raise CorruptCheckpointError(
            f"{file.nbytes} bytes are not a multiple of {ALIGNMENT}", path=file.path
        )


def _check_tensor(manifest: Manifest, tensor: TensorRecord) -> None:
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise CorruptCheckpointError(
            f"{len(tensor.shape)} dimensions, more than {MAX_DIMENSIONS}", tensor=tensor.name
        )
    # Sizes of 0 make any other size harmless to hold and harmful to multiply.
    sizes = [size for size in tensor.shape if size] if 0 in tensor.shape else tensor.shape
    if math.prod(sizes) * tensor.element.itemsize > MAX_SIZE:
        raise CorruptCheckpointError("more than 2^63 bytes", tensor=tensor.name)
    for chunk in tensor.chunks:
        _check_chunk(manifest, tensor, chunk)
    _check_tiling(tensor)
    if tensor.strides is not None and len(tensor.strides) != len(tensor.shape):
        raise CorruptCheckpointError("as many strides as dimensions needed", tensor=tensor.name)


def _check_chunk(manifest: Manifest, tensor: TensorRecord, chunk: ChunkRecord) -> None:
    known = chunk.file < len(manifest.files)
    file = manifest.files[chunk.file] if known else None
    fault = _chunk_fault(tensor, chunk, file)
    if fault is not None:
        raise CorruptCheckpointError(
            fault,
            path=None if file is None else file.path,
            tensor=tensor.name,
            offset=chunk.offset,
            nbytes=chunk.nbytes,
        )


def _chunk_fault(tensor: TensorRecord, chunk: ChunkRecord, file: FileRecord | None) -> str | None:
    """What is wrong with a chunk, if anything is."""
    if file is None:
        return f"file {chunk.file} is not in the manifest"
    shape = tensor.shape
    if len(chunk.start) != len(shape) or len(chunk.shape) != len(shape):
        return "a chunk with other dimensions than its tensor"
    if chunk.shape is not shape:
        for low, size, limit in zip(chunk.start, chunk.shape, shape, strict=True):
            if low + size > limit:
                return "a chunk reaches beyond its tensor"
    if chunk.nbytes != math.prod(chunk.shape) * tensor.element.itemsize:
        return f"a chunk of shape {chunk.shape} cannot have that size"
    if chunk.offset % ALIGNMENT or chunk.offset < file.header_nbytes:
        return "an extent that is misaligned or in the header"
    if chunk.offset + chunk.nbytes > file.nbytes:
        return f"an extent beyond the file's {file.nbytes} bytes"
    if len(chunk.crc32c) != -(-chunk.nbytes // CRC_BLOCK_BYTES):
        return f"{len(chunk.crc32c)} checksums for a chunk of that size"
    if not is_grained(chunk.nbytes, chunk.grain_nbytes, len(chunk.grains)):
        return f"{len(chunk.grains) // 4} grains of {chunk.grain_nbytes} in a chunk of that size"
    return None


def _check_tiling(tensor: TensorRecord) -> None:
    chunks = tensor.chunks
    nbytes = tensor.nbytes
    held = chunks[0].nbytes if len(chunks) == 1 else sum(chunk.nbytes for chunk in chunks)
    if held != nbytes:
        raise CorruptCheckpointError("its chunks do not add up to it", tensor=tensor.name)
    if len(chunks) < 2 or nbytes == 0:
        return
    if len({chunk.file for chunk in chunks}) != len(chunks):
        raise CorruptCheckpointError("two of its chunks in one file", tensor=tensor.name)
    if len(chunks) > MAX_CHUNKS:
        raise CorruptCheckpointError(f"{len(chunks)} chunks", tensor=tensor.name)
    # Sizes add up and every chunk lies inside: they tile the tensor if no two overlap.
    low = np.array([chunk.start for chunk in chunks], np.int64)
    high = low + np.array([chunk.shape for chunk in chunks], np.int64)
    if have_overlap(low, high):
        raise CorruptCheckpointError("two of its chunks overlap", tensor=tensor.name)


def _check_extents(manifest: Manifest, columns: ChunkColumns) -> None:
    """The chunks of a file, which have been checked each for itself, fill it."""
    rows = columns.in_files()
    file, offset = columns.file[rows], columns.offset[rows]
    ends = offset + columns.nbytes[rows]
    reached = np.array([each.header_nbytes for each in manifest.files], np.int64)
    before = np.where(np.diff(file, prepend=-1) != 0, reached[file], np.roll(ends, 1))
    reached[file] = ends  # of several chunks the last one counts
    for misplaced in np.flatnonzero(offset != _aligned(before))[:1].tolist():
        _check_ends(manifest, reached, int(file[misplaced]))
        chunk = columns.chunks[rows[misplaced]]
        what = "overlaps another extent"
        if chunk.offset >= before[misplaced]:
            what = "leaves a gap before it"
        raise CorruptCheckpointError(
            what,
            path=manifest.files[chunk.file].path,
            tensor=manifest.tensors[columns.tensor[rows[misplaced]]].name,
            offset=chunk.offset,
            nbytes=chunk.nbytes,
        )
    _check_ends(manifest, reached, len(manifest.files))


def _check_ends(manifest: Manifest, reached: Column, count: int) -> None:
    """The first `count` files end with the last of their chunks."""
    for file, end in zip(manifest.files[:count], reached.tolist(), strict=False):
        if file.nbytes != align_up(end):
            raise CorruptCheckpointError(
                f"{file.nbytes} bytes, its tensors end at {end}", path=file.path
            )


def _aligned(values: Column) -> Column:
    """`align_up` of each."""
    return -(-values // ALIGNMENT) * ALIGNMENT


def _check_storages(manifest: Manifest) -> None:
    held = [0] * len(manifest.storages)
    for tensor in manifest.tensors:
        strides = tensor.strides
        if tensor.storage is None:
            if strides is not None and not is_dense(tensor.shape, strides):
                raise CorruptCheckpointError("strides leave gaps or overlap", tensor=tensor.name)
            continue
        index, offset = tensor.storage
        if index >= len(held):
            raise CorruptCheckpointError(f"storage {index} of {len(held)}", tensor=tensor.name)
        held[index] += tensor.nbytes
        itemsize = tensor.element.itemsize
        nbytes = (
            tensor.nbytes if strides is None else span_elements(tensor.shape, strides) * itemsize
        )
        if offset + nbytes > manifest.storages[index] or offset % itemsize:
            raise CorruptCheckpointError("does not lie in its storage", tensor=tensor.name)
    for index, (nbytes, filled) in enumerate(zip(manifest.storages, held, strict=True)):
        if nbytes > _MAX_SPREAD * filled:
            raise CorruptCheckpointError(
                f"storage {index} of {nbytes} bytes for {filled} bytes of tensors"
            )
