"""Memory for many large tensors in few mappings, of which a process has no more than some 65,000.

Tensors lie one behind the other in arenas. Each gives its own pages back when it is gone; the
mapping goes with the last one. Pages are of the ordinary size, and touched when they are used.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_ARENA_BYTES = 1 << 30
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Arenas:
    """Hands out zeroed memory. Not thread-safe; what it handed out may be used and die anywhere.

    An arena is as large as all before it together, up to 1 GiB, and a larger range has its own: so
    one tensor takes its own size, and many take one mapping for each GiB.
    """

    def __init__(self) -> None:
        self._arena: mmap.mmap | None = None
        self._used = 0
        self._total = 0

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A writable array of `nbytes` zeros, page-aligned. Raises MemoryError."""
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._arena is None or self._used + pages > len(self._arena):
            self._arena = self._map(pages)
            self._used = 0
        first = self._used
        self._used += pages
        self._total += pages
        return np.asarray(_Range(self._arena, first, nbytes, pages))

    def _map(self, nbytes: int) -> mmap.mmap:
        """An arena for `nbytes`, with as much beyond them as is sensible and to be had."""
        wanted = max(nbytes, min(self._total, _MAX_ARENA_BYTES))
        for size in dict.fromkeys((wanted, nbytes)):
            try:
                return mmap.mmap(-1, size, flags=_FLAGS)
            except OSError as error:
                last = error
        raise MemoryError(f"cannot map {nbytes} bytes: {last.strerror}") from last


class _Range:
    """What numpy sees as the memory of one range; its end is the end of the last use."""

    __slots__ = ("__array_interface__", "_arena", "_first", "_pages")

    def __init__(self, arena: mmap.mmap, first: int, nbytes: int, pages: int) -> None:
        self._arena = arena
        self._first = first
        self._pages = pages
        address = np.frombuffer(arena, np.uint8).ctypes.data + first
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }

    def __del__(self, advice: int = mmap.MADV_DONTNEED) -> None:
        self._arena.madvise(advice, self._first, self._pages)
