"""Bytes of a snapshot, read from the files that keep them, whatever the state of now looks like."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from aio import Engine, File, Request
from swap.snapshots.contents import FileRange

BUFFER_BYTES = 4 * 1024 * 1024


class RangeReader:
    """Reads ranges of files with an engine of its own, which takes no memory but the engine's."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._files: dict[str, File] = {}

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, parts: Sequence[FileRange], start: int, out: np.ndarray) -> None:
        """Fill flat bytes ``out`` from byte ``start`` of what ``parts`` are put together of.
        Raises ``AioError``.
        """
        first = 0
        for part in parts:
            low, high = max(start, first), min(start + out.size, first + part.nbytes)
            if low < high:
                self._read(part, low - first, out[low - start : high - start])
            first += part.nbytes

    def _read(self, part: FileRange, start: int, out: np.ndarray) -> None:
        file = self._file(part.file)
        assert self._engine is not None
        requests = [Request("read", file, part.offset + start, out)]
        for operation in self._engine.submit(requests):
            operation.result()

    def _file(self, name: str) -> File:
        if self._engine is None:
            self._engine = self._stack.enter_context(Engine())
        if name not in self._files:
            file = self._engine.open(self._paths[name], "r")
            self._files[name] = self._stack.enter_context(file)
        return self._files[name]
