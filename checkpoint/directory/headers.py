"""The first bytes of a data file: they tell it from one that has taken its place."""

from __future__ import annotations

from aio import Engine, File, Slab
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import crc32c
from checkpoint.format.records import FileRecord

_PIECE_BYTES = 1 << 20


def check_header(engine: Engine, file: File, record: FileRecord, *, lane: int = 0) -> None:
    """Raises CorruptCheckpointError for a file with another header than the manifest says.

    Whatever its tensors hold: the header has the id of the save.
    """
    # Memory of whole pages: into any other the engine reads by way of buffers of its own, which
    # each lane then has beside what a load may take.
    header = Slab(_PIECE_BYTES, huge_pages=False).allocate(_PIECE_BYTES)
    found = 0
    for first in range(0, record.header_nbytes, _PIECE_BYTES):
        piece = header[: min(record.header_nbytes - first, _PIECE_BYTES)]
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
