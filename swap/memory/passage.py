"""A bounce buffer between SSDs and memory whose alignment direct I/O does not take.

Direct I/O needs addresses that are aligned as the offsets in the file are. Memory of torch, of
numpy or of a program seldom is, and the engine would copy it through buffers of its own, which are
in no budget. So values that are not aligned are copied here, through one slab that is part of the
budget.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from aio import Operation, Slab, SlabFullError
from aio.errors import let_go
from swap.plan.layout import CHUNK_BYTES, PAGE

_RELEASE_SECONDS = 5.0
"""For so long nobody gave a chunk back: then somebody keeps them who has no use for them."""

_WIDE_BYTES = 1024 * 1024
"""Of a transfer where memory is not short: what keeps a disk busy, at few of them."""

_log = logging.getLogger(__name__)

Submit = Callable[[int, np.ndarray], Operation]
"""Starts a transfer of that many bytes further on, with that memory."""
Write = Callable[[int, np.ndarray, Submit], None]
"""Writes flat bytes from an offset of a file on."""


@dataclass(slots=True, eq=False)
class _Chunk:
    operation: Operation
    buffer: np.ndarray
    target: np.ndarray | None = None


class Passage:
    """Thread-safe; callers share the slab, and take ``chunk_bytes`` of it at a time."""

    def __init__(self, slab: Slab, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._slab = slab
        self._chunk_bytes = chunk_bytes

    def widen(self, slab: Slab) -> None:
        """From now on go through this slab, in transfers as large as ``wide_passage`` has them."""
        self._slab, self._chunk_bytes = slab, _wide_bytes(slab)

    def read(self, offset: int, out: np.ndarray, submit: Submit) -> None:
        """Fill flat bytes ``out`` from ``offset`` of a file. Raises what a transfer raises; nothing
        touches ``out`` after the return.
        """
        with _window() as under_way:
            for start in range(0, out.size, self._chunk_bytes):
                part = out[start : start + self._chunk_bytes]
                self._start(under_way, submit, offset, start, part.size, target=part)

    def write(self, offset: int, data: np.ndarray, submit: Submit) -> None:
        """Write flat bytes ``data`` from ``offset`` of a file on. Raises what a transfer raises."""
        with self.behind() as write:
            write(offset, data, submit)

    @contextmanager
    def behind(self) -> Iterator[Write]:
        """``write`` for many, that returns when the bytes are copied: they are written behind it,
        as far as the slab goes, and have been when the block ends. Raises there, or in a later
        call, what a transfer raises; all of them have ended then, too.
        """
        with _window() as under_way:
            yield partial(self._write, under_way)

    def _write(
        self, under_way: deque[_Chunk], offset: int, data: np.ndarray, submit: Submit
    ) -> None:
        for start in range(0, data.size, self._chunk_bytes):
            part = data[start : start + self._chunk_bytes]
            self._start(under_way, submit, offset, start, part.size, values=part)

    def write_zeros(self, nbytes: int, submit: Submit) -> None:
        """Write ``nbytes`` zeros from a page's beginning on. Raises what a transfer raises."""
        with _window() as under_way:
            for start in range(0, nbytes, self._chunk_bytes):
                size = min(self._chunk_bytes, nbytes - start)
                self._start(under_way, submit, 0, start, size, values=0)

    def copy(self, nbytes: int, read: Submit, write: Submit) -> None:
        """Write what is read, from a page's beginning on. Raises what a transfer raises."""
        for start in range(0, nbytes, self._chunk_bytes):
            size = min(self._chunk_bytes, nbytes - start)
            with _window() as under_way:
                buffer = self._take(size, 0, under_way)
                for submit in (read, write):
                    under_way.append(_Chunk(submit(start, buffer), buffer))
                    _finish(under_way.popleft())

    def _start(
        self,
        under_way: deque[_Chunk],
        submit: Submit,
        offset: int,
        start: int,
        nbytes: int,
        *,
        values: np.ndarray | int | None = None,
        target: np.ndarray | None = None,
    ) -> None:
        """Start one chunk, with ``values`` in it. A frame of its own refers to the memory: it can
        be cleared where the error is seen first.
        """
        buffer = self._take(nbytes, offset + start, under_way)
        if values is not None:
            buffer[:] = values
        under_way.append(_Chunk(submit(start, buffer), buffer, target))

    def _take(self, nbytes: int, offset: int, under_way: deque[_Chunk]) -> np.ndarray:
        """Memory that lies in its page as ``offset`` does, once there is some."""
        lead = offset % PAGE
        while True:
            slab = self._slab
            try:
                return slab.allocate(lead + nbytes)[lead:]
            except SlabFullError:
                if under_way:
                    _finish(under_way.popleft())
                elif not slab.wait_for_release(_RELEASE_SECONDS):
                    self._do_without(slab)

    def _do_without(self, slab: Slab) -> None:
        """Nothing came back to ``slab``: get what is kept in cycles, or else use another.

        Frames of an error that somebody keeps may hold chunks, and whoever keeps it may be the one
        that waits here. Values are worth more than this part of the budget.
        """
        gc.collect()
        if slab.wait_for_release(0.0) or self._slab is not slab:
            return
        _log.warning(
            "all %d bytes for transfers that are not aligned have been held for %g seconds, by a "
            "disk that does not answer or by the traceback of an error that is kept (by a "
            "variable, a debugger, sys.last_traceback); as many are taken beyond the budget",
            slab.nbytes,
            _RELEASE_SECONDS,
        )
        self._slab = Slab(slab.nbytes, inherited=False)


def wide_passage(slab: Slab) -> Passage:
    """Over a slab that is there for many transfers: large ones, and eight of them at a time."""
    return Passage(slab, _wide_bytes(slab))


def _wide_bytes(slab: Slab) -> int:
    return min(_WIDE_BYTES, slab.nbytes // 8 // PAGE * PAGE)


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
    except BaseException as failure:
        let_go(failure)  # whoever keeps it is not to keep the chunks
        raise
    finally:
        try:
            for chunk in under_way:
                chunk.operation.abandon()  # an error before its own is raised
        finally:
            under_way.clear()


def _finish(chunk: _Chunk) -> None:
    chunk.operation.result()
    if chunk.target is not None:
        chunk.target[:] = chunk.buffer
