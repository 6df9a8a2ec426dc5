"""Reading a data file: its first bytes, which tell it from one that has taken its place, and
others, which may be gone by then.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence

from aio import AioError, Engine, File, Operation, Slab
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
        wait_for_read(engine.read(file, first, piece, lane=lane))
        found = crc32c(piece, found)
    if found != record.header_crc32c:
        raise CorruptCheckpointError(
            f"the header's CRC-32C is {found:08x}, the manifest says "
            f"{record.header_crc32c:08x}: not the file that was saved",
            path=file.path,
            offset=0,
            nbytes=record.header_nbytes,
        )


def wait_for_read(operation: Operation, tensor_at: Callable[[int], str] | None = None) -> None:
    """Until bytes of a data file have come. Raises CorruptCheckpointError where it has become
    shorter since it was opened, and AioError. `tensor_at` gives what the file has at an offset.
    """
    try:
        operation.result()
    except AioError as error:
        if error.errno != errno.ENODATA or error.offset is None:
            raise
        end = error.offset + error.transferred
        raise CorruptCheckpointError(
            "the file ends before these bytes do, and did not when it was opened",
            path=error.filename,
            tensor=None if tensor_at is None else tensor_at(end),
            offset=error.offset,
            nbytes=error.nbytes,
        ) from error


def wait_for_reads(operations: Sequence[Operation], tensor_at: Callable[[int], str]) -> None:
    """`wait_for_read` for each; nothing is in flight behind the first error."""
    waiting = deque(operations)
    try:
        while waiting:
            wait_for_read(waiting[0], tensor_at)
            waiting.popleft()
    except BaseException:
        for operation in waiting:
            operation.abandon()
        raise
