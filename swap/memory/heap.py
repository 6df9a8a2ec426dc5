"""What the C library keeps of memory that was freed, held small while state is offloaded.

glibc maps an allocation of 128 KiB or more by itself, and unmaps it when it is freed; but each one
that is freed raises that threshold, up to 32 MiB. From then on gradients and activations come from
the heap, and in a backward pass over many layers it was measured to grow by nearly all gradients,
though one at a time is alive (torch asks for aligned memory, which glibc cuts from a block that is
a little larger; a gradient of the same size seems not to fit again where the last one was). So the
threshold is fixed while any ``SmallHeap`` is entered. What is mapped costs page faults each time,
so none is entered where memory for all that may be kept is there.

Nothing is done where ``malloc`` is not glibc's (musl; jemalloc, tcmalloc or mimalloc, preloaded or
linked in).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache

MMAP_THRESHOLD_BYTES = 128 * 1024
"""While state is offloaded: glibc's own value, before anything was freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_DYNAMIC_LIMIT_BYTES = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
"""Where glibc's threshold ends that grows, and from where on everything is mapped."""


class SmallHeap:
    """While one of them is entered, freed memory of ``MMAP_THRESHOLD_BYTES`` or more goes back to
    the system at once, for the whole process. Leaving may be repeated.

    One that is never left stays in force until the process ends, as does the block it is for.

    glibc has no way to let its threshold grow again, nor to ask for its value. Afterwards it is at
    the largest that it would have grown to, as in a process that has freed a tensor of 32 MiB; one
    that the environment had set (``MALLOC_MMAP_THRESHOLD_``) is lost.
    """

    def __enter__(self) -> SmallHeap:
        with _lock:
            _entered.add(id(self))
            _set_thresholds(MMAP_THRESHOLD_BYTES, MMAP_THRESHOLD_BYTES)
        give_back_freed_memory()  # or what is free at the end of the heap is used first
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if id(self) in _entered:
                _entered.discard(id(self))
                if not _entered:
                    _set_thresholds(_DYNAMIC_LIMIT_BYTES, 2 * _DYNAMIC_LIMIT_BYTES)


# Leaving may happen in a finalizer, anywhere in another enter or leave of the same thread.
_lock = threading.RLock()
_entered: set[int] = set()


def _after_fork() -> None:
    """In a forked child: the lock may be that of a thread which is not there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def give_back_freed_memory() -> None:
    """Return whole free pages to the system. What is in use does not move. Costs a millisecond or
    two for tens of megabytes.
    """
    trim = _glibc("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    mallopt = _glibc("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)


@cache
def _glibc(name: str, *argument_types: type) -> Callable[..., int] | None:
    """A function of glibc's allocator; None where ``malloc`` is another one's."""
    try:
        ours, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        if _address_of(ours.malloc) != _address_of(glibc.malloc):
            return None
        function = glibc[name]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = argument_types, ctypes.c_int
    return function


def _address_of(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
