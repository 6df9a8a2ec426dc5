"""Memory for many large tensors in few mappings, of which a process has no more than some 65,000.

Tensors lie one behind the other in arenas. Each gives its own pages back when it is gone; the
mapping goes with the last one. Pages are of the ordinary size, and touched when they are used.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoint._native import ffi, lib

_MAX_ARENA_BYTES = 1 << 30


class Arenas:
    """Hands out zeroed memory. Not thread-safe; what it handed out may be used and die anywhere.

    An arena is as large as all before it together, up to 1 GiB, and a larger range has its own: so
    one tensor takes its own size, and many take one mapping for each GiB.
    """

    def __init__(self) -> None:
        self._arena: Any = None
        self._size = 0
        self._used = 0
        self._total = 0

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A writable array of `nbytes` zeros, page-aligned. Raises MemoryError."""
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used + pages > self._size:
            self._map(pages)
        first = self._used
        self._used += pages
        self._total += pages
        return np.asarray(_Range(self._arena[0], first, nbytes, pages))

    def _map(self, nbytes: int) -> None:
        """A new arena for `nbytes`, with as much beyond them as is sensible and to be had."""
        wanted = max(nbytes, min(self._total, _MAX_ARENA_BYTES))
        for size in dict.fromkeys((wanted, nbytes)):
            arena = ffi.gc(ffi.new("struct ckpt_arena **"), lib.ckpt_arena_drop)
            error = -lib.ckpt_arena_new(arena, size)
            if not error:
                self._arena, self._size, self._used = arena, size, 0
                return
        raise MemoryError(f"cannot map {nbytes} bytes: {os.strerror(error)}")


class _Range:
    """What numpy sees as the memory of one range; its end is the end of the last use.

    C ends it: tensors are let go of anywhere, and Python would swallow an interrupt that comes
    inside a finalizer of its own.
    """

    __slots__ = ("__array_interface__", "_native")

    def __init__(self, arena: Any, first: int, nbytes: int, pages: int) -> None:
        self._native = _taken(arena, first, pages)
        address = int(ffi.cast("uintptr_t", self._native.data))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def _taken(arena: Any, first: int, nbytes: int) -> Any:
    """A range of an arena in C, which gives its pages back when it is let go of."""
    taken = ffi.gc(ffi.new("struct ckpt_range *"), lib.ckpt_range_drop)
    lib.ckpt_range_take(taken, arena, first, nbytes)
    return taken
