"""What a manifest says, as immutable records. Sizes and offsets are in bytes.

Those of which a checkpoint has very many are tuples, which take a third of the time to make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format import elements
from checkpoint.format.checksum import CRC_BLOCK_BYTES

Shape = tuple[int, ...]
Sums = npt.NDArray[np.uint32]

MAX_SIZE = (1 << 63) - 1
"""Of any integer in a manifest."""

MAX_CHUNKS = 4096
"""Of a tensor: readers compare each of them with all others."""

MAX_DIMENSIONS = 64
"""Of a tensor, for the sake of numpy, which has no more."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A data file: `path` is relative to root number `root`, or to the checkpoint if None."""

    root: int | None
    path: str
    nbytes: int
    header_nbytes: int
    header_crc32c: int


class ChunkRecord(NamedTuple):
    """A box of a tensor, row-major in one extent of one file; one CRC per 16 MiB of it, and one per
    grain of `grain_nbytes` if that is not 0: four bytes each in `grains`, the highest first.
    """

    file: int
    offset: int
    nbytes: int
    start: Shape
    shape: Shape
    crc32c: tuple[int, ...]
    grain_nbytes: int = 0
    grains: bytes = b""

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the smallest part that has a checksum."""
        return self.grain_nbytes or CRC_BLOCK_BYTES

    def unit_sums(self, unit: int, first: int, last: int) -> Sums:
        """The checksums of units [first, last) of `unit` bytes: of its grains, or of its blocks."""
        if unit == self.grain_nbytes:
            return np.frombuffer(self.grains, ">u4")[first:last].astype(np.uint32)
        return np.array(self.crc32c[first:last], np.uint32)

    def block(self, number: int) -> tuple[int, int]:
        """First byte and length, within the chunk, of checksum block `number`."""
        first = number * CRC_BLOCK_BYTES
        return first, min(CRC_BLOCK_BYTES, self.nbytes - first)

    def wrong_sum(
        self, number: int, crc: int, *, path: Path, tensor: str
    ) -> CorruptCheckpointError:
        """What to raise or report where the bytes of a block have another CRC-32C than it says."""
        return self.wrong_unit_sum(CRC_BLOCK_BYTES, number, crc, path=path, tensor=tensor)

    def wrong_unit_sum(
        self, unit: int, number: int, crc: int, *, path: Path, tensor: str
    ) -> CorruptCheckpointError:
        """As `wrong_sum`, for a unit of so many bytes."""
        first = number * unit
        expected = int(self.unit_sums(unit, number, number + 1)[0])
        return CorruptCheckpointError(
            f"the CRC-32C of these bytes is {crc:08x}, the manifest says {expected:08x}",
            path=path,
            tensor=tensor,
            offset=self.offset + first,
            nbytes=min(unit, self.nbytes - first),
        )


class TensorRecord(NamedTuple):
    """A stored tensor. `strides` (elements) and `storage` say how to lay it out in memory.

    `strides` is None for row-major; `storage` is (index of the shared storage, byte offset there).
    """

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[ChunkRecord, ...]
    strides: Shape | None = None
    storage: tuple[int, int] | None = None

    def with_chunks(self, chunks: Iterable[ChunkRecord]) -> TensorRecord:
        """The same tensor, stored in these."""
        name, dtype, shape, _, strides, storage = self
        return TensorRecord(name, dtype, shape, tuple(chunks), strides, storage)

    @property
    def element(self) -> elements.ElementType:
        return elements.BY_NAME[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about one checkpoint. `tree` is the JSON node of the state tree."""

    uuid: str
    world_size: int
    roots: tuple[str, ...]
    files: tuple[FileRecord, ...]
    storages: tuple[int, ...]
    tensors: tuple[TensorRecord, ...]
    tree: Any
    saved: int = 0
    """When, in nanoseconds since 1970; 0 if it does not say."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: their chunks are all of them."""
        return sum(chunk.nbytes for tensor in self.tensors for chunk in tensor.chunks)

    def file_path(self, checkpoint: Path, file: FileRecord) -> Path:
        """Where a data file of the checkpoint at `checkpoint` is."""
        root = checkpoint if file.root is None else Path(self.roots[file.root])
        return root / file.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInfo:
    """What a finished save did. `nbytes` are the tensors' bytes, `file_nbytes` the data files'."""

    path: Path
    uuid: str
    nbytes: int
    file_nbytes: int
    num_tensors: int
    num_files: int
    seconds: float
