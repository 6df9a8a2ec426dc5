"""Host memory for saves and loads: how much there is to take, and taking it."""

from __future__ import annotations

from pathlib import Path

import psutil

from aio import Slab

_LIMITS = (
    # Version 2, then version 1: the limit, and what counts against it.
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int:
    """Bytes that can be taken without swapping and without breaking a limit of this container."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _LIMITS:
        try:
            left = int(limit.read_text()) - int(usage.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        available = min(available, max(left, 0))
    return available


def staging_slab(nbytes: int) -> Slab:
    """Memory that many transfers pass through: in huge pages, which made them twice as fast."""
    return Slab(nbytes)


def plain_slab(nbytes: int) -> Slab:
    """Page-aligned memory in pages of the ordinary size, touched when it is used.

    For much memory at once: when memory is fragmented the kernel moves other pages about to make
    huge ones, in the middle of a fault.
    """
    return Slab(nbytes, huge_pages=False)


class KeptMemory:
    """A slab that is kept from one use to the next, so that its pages are touched only once.

    Not for two uses at a time: what is still in use is left to it, and new memory taken.
    """

    def __init__(self) -> None:
        self._slab: Slab | None = None

    def take(self, nbytes: int) -> Slab:
        """A slab with at least `nbytes` free."""
        slab = self._slab
        if slab is None or slab.largest_free_bytes < nbytes:
            slab = self._slab = None  # gives the old memory back before there is more
            slab = self._slab = plain_slab(nbytes)
        return slab
