"""The chunks of all tensors as columns of numbers, and what they show of all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkpoint.format import elements
from checkpoint.format.checksum import CRC_BLOCK_BYTES, GRAIN_SIZES
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.records import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    ChunkRecord,
    FileRecord,
    Shape,
    TensorRecord,
)

Column = npt.NDArray[np.int64]


class ChunkColumns(NamedTuple):
    """A row for each chunk: in the order of the tensors, and of the chunks of each.

    `tensor` is the index of the chunk's tensor.
    """

    chunks: list[ChunkRecord]
    tensor: Column
    file: Column
    offset: Column
    nbytes: Column

    def in_files(self) -> Column:
        """The rows of chunks that are not empty, file by file in the order of each."""
        rows = np.flatnonzero(self.nbytes)
        keys = (self.nbytes[rows], self.offset[rows], self.file[rows])
        return rows[np.lexsort(keys)]


def chunk_columns(tensors: Sequence[TensorRecord]) -> ChunkColumns:
    """The columns of the chunks of these tensors, whose numbers are from 0 to MAX_SIZE."""
    chunks = list(chain.from_iterable([tensor.chunks for tensor in tensors]))
    counts = np.array([len(tensor.chunks) for tensor in tensors], np.int64)
    return ChunkColumns(
        chunks,
        np.repeat(np.arange(len(tensors)), counts),
        np.array([chunk.file for chunk in chunks], np.int64),
        np.array([chunk.offset for chunk in chunks], np.int64),
        np.array([chunk.nbytes for chunk in chunks], np.int64),
    )


def unclear_tensors(
    files: Sequence[FileRecord], tensors: Sequence[TensorRecord], columns: ChunkColumns
) -> list[int]:
    """Indices of tensors of which columns alone do not show that they and their chunks are sound.

    Those of more chunks than one, and of strides, are always among them.
    """
    if not files:
        return list(range(len(tensors)))
    is_clear = np.bincount(columns.tensor, minlength=len(tensors)) == 1
    is_clear &= np.array([tensor.strides is None for tensor in tensors], bool)
    sizes = np.array(_sizes(tensors), np.int64)
    is_sound = _sound_chunks(files, columns) & (columns.nbytes == sizes[columns.tensor])
    shapes = [tensors[number].shape for number in columns.tensor.tolist()]
    is_whole = [
        chunk.shape == shape and len(chunk.start) == len(shape) and not any(chunk.start)
        for chunk, shape in zip(columns.chunks, shapes, strict=True)
    ]
    is_clear[columns.tensor[~(is_sound & np.array(is_whole, bool))]] = False
    found: list[int] = np.flatnonzero(~is_clear).tolist()
    return found


def _sizes(tensors: Sequence[TensorRecord]) -> list[int]:
    """Bytes of each tensor; -1 where its shape is none that a tensor can have."""
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    by_kind = {(dtype, shape): _size(dtype, shape) for dtype, shape in set(kinds)}
    return [by_kind[kind] for kind in kinds]


def _size(dtype: str, shape: Shape) -> int:
    itemsize = elements.BY_NAME[dtype].itemsize
    # Sizes of 0 make any other size harmless to hold and harmful to multiply.
    largest = math.prod([size for size in shape if size]) * itemsize
    if len(shape) > MAX_DIMENSIONS or largest > MAX_SIZE:
        return -1
    return 0 if 0 in shape else largest


def _sound_chunks(files: Sequence[FileRecord], columns: ChunkColumns) -> npt.NDArray[np.bool_]:
    """Which chunks lie aligned in their file, behind its header, with as many sums as they need."""
    is_known = columns.file < len(files)
    file = np.where(is_known, columns.file, 0)
    headers = np.array([each.header_nbytes for each in files], np.int64)[file]
    lengths = np.array([each.nbytes for each in files], np.int64)[file]
    num_sums = np.array([len(chunk.crc32c) for chunk in columns.chunks], np.int64)
    kinds = [(chunk.nbytes, chunk.grain_nbytes, len(chunk.grains)) for chunk in columns.chunks]
    sound = {kind: is_grained(*kind) for kind in set(kinds)}  # there are few different ones
    is_sound: npt.NDArray[np.bool_] = (
        is_known
        & (columns.offset % ALIGNMENT == 0)
        & (columns.offset >= headers)
        & (columns.nbytes <= lengths - columns.offset)
        & (num_sums == -(-columns.nbytes // CRC_BLOCK_BYTES))
        & np.array([sound[kind] for kind in kinds], bool)
    )
    return is_sound


def is_grained(nbytes: int, grain_nbytes: int, sums_nbytes: int) -> bool:
    """Whether a chunk can have grains of a size, and sums of so many bytes are those of them; or
    there are neither.
    """
    return grain_nbytes == sums_nbytes == 0 or (
        grain_nbytes in GRAIN_SIZES
        and grain_nbytes < nbytes
        and sums_nbytes == -(-nbytes // grain_nbytes) * 4
    )
