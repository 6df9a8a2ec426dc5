"""Memory that values pass through between an SSD and memory that direct I/O cannot take as it is.

Direct I/O wants addresses that are aligned as the offsets in the file are. Memory of torch, of
numpy or of a program seldom is, and the engine would copy it in buffers of its own, of which a
budget knows nothing. So what is not aligned is copied here, through one slab that is part of the
budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from aio import AioError, Operation, Slab, SlabFullError
from swap.layout import PAGE

CHUNK_BYTES = 128 * 1024
_CHUNKS = 4
PASSAGE_BYTES = _CHUNKS * (CHUNK_BYTES + PAGE)
"""Of the slab: so many chunks in flight, each with room to start anywhere in a page."""
_RELEASE_SECONDS = 1.0

Submit = Callable[[int, np.ndarray], Operation]
"""Starts a transfer of that many bytes further on, with that memory."""


@dataclass(slots=True, eq=False)
class _Chunk:
    operation: Operation
    buffer: np.ndarray
    target: np.ndarray | None = None


class Passage:
    """Thread-safe; callers share the slab."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def read(self, offset: int, out: np.ndarray, submit: Submit) -> None:
        """Fill flat bytes ``out`` from ``offset`` of a file. Raises what a transfer raises; nothing
        touches ``out`` after the return.
        """
        with _window() as under_way:
            for start in range(0, out.size, CHUNK_BYTES):
                part = out[start : start + CHUNK_BYTES]
                buffer = self._take(part.size, offset + start, under_way)
                under_way.append(_Chunk(submit(start, buffer), buffer, part))

    def write(self, offset: int, data: np.ndarray, submit: Submit) -> None:
        """Write flat bytes ``data`` from ``offset`` of a file on. Raises what a transfer raises."""
        with _window() as under_way:
            for start in range(0, data.size, CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                buffer = self._take(part.size, offset + start, under_way)
                buffer[:] = part
                under_way.append(_Chunk(submit(start, buffer), buffer))

    def write_zeros(self, nbytes: int, submit: Submit) -> None:
        """Write ``nbytes`` zeros from a page's beginning on. Raises what a transfer raises."""
        with _window() as under_way:
            for start in range(0, nbytes, CHUNK_BYTES):
                buffer = self._take(min(CHUNK_BYTES, nbytes - start), 0, under_way)
                buffer.fill(0)
                under_way.append(_Chunk(submit(start, buffer), buffer))

    def _take(self, nbytes: int, offset: int, under_way: deque[_Chunk]) -> np.ndarray:
        """Memory that lies in its page as ``offset`` does, once there is some."""
        lead = offset % PAGE
        while True:
            try:
                return self._slab.allocate(lead + nbytes)[lead:]
            except SlabFullError:
                if under_way:
                    _finish(under_way.popleft())
                else:
                    self._slab.wait_for_release(_RELEASE_SECONDS)


def lies_as(offset: int, memory: np.ndarray) -> bool:
    """Whether direct I/O takes ``memory`` as it is, for a transfer at ``offset`` of a file."""
    return (memory.ctypes.data - offset) % PAGE == 0


@contextmanager
def _window() -> Iterator[deque[_Chunk]]:
    """Chunks under way, finished in their order; all of them have ended when the block is left."""
    under_way: deque[_Chunk] = deque()
    try:
        yield under_way
        while under_way:
            _finish(under_way.popleft())
    finally:
        for chunk in under_way:
            with suppress(AioError):  # one before it is raised
                chunk.operation.result()


def _finish(chunk: _Chunk) -> None:
    chunk.operation.result()
    if chunk.target is not None:
        chunk.target[:] = chunk.buffer
