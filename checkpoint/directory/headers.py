"""The first bytes of a data file: they tell it from one that has taken its place."""

from __future__ import annotations

import numpy as np

from aio import Engine, File
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import crc32c
from checkpoint.format.records import FileRecord

_PIECE_BYTES = 1 << 20


def check_header(engine: Engine, file: File, record: FileRecord, *, lane: int = 0) -> None:
    """Raises CorruptCheckpointError for a file with another header than the manifest says.

    Whatever its tensors hold: the header has the id of the save.
    """
    header = np.empty(min(record.header_nbytes, _PIECE_BYTES), np.uint8)
    found = 0
    for first in range(0, record.header_nbytes, _PIECE_BYTES):
        piece = header[: record.header_nbytes - first]
        engine.read(file, first, piece, lane=lane).result()
        found = crc32c(piece, found)
    if found != record.header_crc32c:
        raise CorruptCheckpointError(
            f"the header's CRC-32C is {found:08x}, the manifest says "
            f"{record.header_crc32c:08x}: not the file that was saved",
            path=file.path,
            offset=0,
            nbytes=record.header_nbytes,
        )
