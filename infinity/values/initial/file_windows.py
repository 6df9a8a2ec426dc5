"""Bytes of files that are read in order, past the page cache and no mapping: what a window has is
read while those before it are used.

What does not follow what was read before is right as well, and costs the windows that were under
way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from aio import Engine, File, Operation, Slab

WINDOW_BYTES = 1 << 20
"""Whole pages, each a range of the file and of memory, so that all but its end is direct I/O."""
Identity = tuple[int, int, int, int]
"""(device, inode, bytes, time of the last change): others where a file was replaced or written."""
NUM_WINDOWS = 8
"""In flight, or in memory, at once: what keeps a disk busy."""


class FileWindows:
    """Reads ranges of files, one file open at a time. Nothing is taken before the first read; after
    ``close`` another one begins anew. For one thread.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._slab: Slab | None = None
        self._free: list[np.ndarray] = []
        self._file: File | None = None
        self._file_bytes = 0
        self._identity: Identity | None = None
        self._windows: dict[int, tuple[Operation, np.ndarray, np.ndarray]] = {}
        """The read of each, what it fills, and the memory that this is the beginning of."""

    def read(
        self, path: Path, offset: int, out: memoryview, identity: Identity | None = None
    ) -> None:
        """Fill ``out`` with the bytes of a file from ``offset`` on.

        Raises ``AioError``, also for a file that ends before that, what opening it raises, and
        ``ValueError`` for one that has not the ``identity`` any more.
        """
        try:
            self._open(path)
            if identity not in (None, self._identity):
                raise changed(path)
            # One that ends before what is wanted is to be an error of the read that needs it.
            self._file_bytes = max(self._file_bytes, offset + len(out))
            done = 0
            while done < len(out):
                number, inside = divmod(offset + done, WINDOW_BYTES)
                part = min(len(out) - done, WINDOW_BYTES - inside)
                self._copy(number, inside, out[done : done + part])
                done += part
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for what is under way, and let go of files and memory. Idempotent."""
        self._close_file()
        self._free.clear()
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open(self, path: Path) -> None:
        if self._engine is None:
            self._engine = Engine()
        if self._slab is None:
            self._slab = Slab(NUM_WINDOWS * WINDOW_BYTES, inherited=False)
            self._free = [self._slab.allocate(WINDOW_BYTES) for _ in range(NUM_WINDOWS)]
        if self._file is None or self._file.path != path:
            self._close_file()
            self._file = self._engine.open(path)
            self._identity = identity_of(path.stat())
            self._file_bytes = self._identity[2]

    def _close_file(self) -> None:
        while self._windows:
            self._drop(next(iter(self._windows)))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _copy(self, number: int, inside: int, out: memoryview) -> None:
        """Fill ``out`` from one window, when those that come next are under way."""
        if number in self._windows and inside + len(out) > len(self._windows[number][1]):
            self._drop(number)  # it was cut where the file ended as it was opened
        for coming in range(number, number + NUM_WINDOWS):
            if coming not in self._windows and coming * WINDOW_BYTES < self._file_bytes:
                self._begin(coming, range(number, number + NUM_WINDOWS))
        operation, window, _ = self._windows[number]
        operation.result()
        out[:] = window[inside : inside + len(out)].data

    def _begin(self, number: int, wanted: range) -> None:
        """Start to read a window, into the memory of one that is not ``wanted``."""
        assert self._engine is not None
        assert self._file is not None
        if not self._free:
            self._drop(next(known for known in self._windows if known not in wanted))
        memory = self._free.pop()
        start = number * WINDOW_BYTES
        window = memory[: min(WINDOW_BYTES, self._file_bytes - start)]
        self._windows[number] = self._engine.read(self._file, start, window), window, memory

    def _drop(self, number: int) -> None:
        operation, _, memory = self._windows[number]
        operation.abandon()  # who did not ask for it is not told that it failed
        del self._windows[number]
        self._free.append(memory)


@dataclass(slots=True)
class StoredRange:
    """A tensor whose row-major bytes lie in a file from ``offset`` on, as a ``ByteSource``."""

    windows: FileWindows
    path: Path
    identity: Identity
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, out: memoryview) -> None:
        """See ``FileWindows.read``."""
        self.windows.read(self.path, self.offset + start, out, self.identity)


def identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def changed(path: Path, why: str = "") -> ValueError:
    """The error of a file that is another than the one whose header was read."""
    return ValueError(
        f"{path} is another file than it was{why}: another program has changed it since it was "
        "opened; take the weights again when that is done"
    )
