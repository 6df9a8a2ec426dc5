"""Giving memory that was freed back to the system.

The allocator of the C library keeps freed memory for later. Between tensors of megabytes that are
freed out of order it cannot use much of it again: without this, a process whose activations leave
for NVMe grows as if they had stayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back_freed_memory() -> None:
    """Return whole free pages to the system, where the C library can (glibc). What is in use does
    not move. Costs a millisecond or two for tens of megabytes.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
