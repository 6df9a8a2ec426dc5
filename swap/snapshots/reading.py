"""Bytes of a snapshot, read from the files that keep them, whatever the state of now looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from aio import Engine, File, Operation, Request
from swap.snapshots.contents import FileRange
from swap.snapshots.sums import Sums
from swap.storage.checksums import BlockSums, Damage, checked_read

BUFFER_BYTES = 4 * 1024 * 1024


class RangeReader:
    """Reads ranges of files with an engine of its own, which takes no memory but the engine's.

    ``sums`` gives what is known of their bytes; what is read is compared with that. ``owner``:
    whose the bytes at an offset of a file are.
    """

    def __init__(
        self,
        paths: dict[str, Path],
        sums: Callable[[], Sums],
        owner: Callable[[str, int], str],
    ) -> None:
        self._paths = paths
        self._owner = owner
        self._read_sums = sums
        self._sums: dict[str, BlockSums] = {}
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._files: dict[str, File] = {}

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, parts: Sequence[FileRange], start: int, out: np.ndarray) -> None:
        """Fill flat bytes ``out`` from byte ``start`` of what ``parts`` are put together of.
        Raises ``AioError``, and of these ``CorruptSwapError``.
        """
        first = 0
        for part in parts:
            low, high = max(start, first), min(start + out.size, first + part.nbytes)
            if low < high:
                self._read(part, low - first, out[low - start : high - start])
            first += part.nbytes

    def _read(self, part: FileRange, start: int, out: np.ndarray) -> None:
        file = self._file(part.file)
        request = Request("read", file, part.offset + start, out)
        damage = Damage(file, partial(self._owner, part.file))
        checked_read(request, self._submit, self._sums[part.file], damage).result()

    def _submit(self, request: Request) -> Operation:
        assert self._engine is not None
        return self._engine.submit([request])[0]

    def _file(self, name: str) -> File:
        if self._engine is None:
            self._engine = self._stack.enter_context(Engine())
            self._sums = {path: BlockSums() for path in self._paths}
            for part, sums in self._read_sums().items():
                self._sums[part.file].put(part.offset, sums)
        if name not in self._files:
            file = self._engine.open(self._paths[name], "r")
            self._files[name] = self._stack.enter_context(file)
        return self._files[name]
