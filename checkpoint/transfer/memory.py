"""Host memory for saves and loads: how much there is to take, and taking it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from aio import Slab
from aio.process.cgroups import memory_limits

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def available_bytes() -> int:
    """Bytes that can be taken without swapping and without breaking a limit of the control group
    of this process or of one above it.
    """
    left = (limit.left_bytes for limit in memory_limits())
    return min([int(psutil.virtual_memory().available), *left])


def machine_bytes() -> int:
    """Bytes that this process could take if it had the machine, or what its control groups allow
    of it, to itself.
    """
    limits = (limit.limit_bytes for limit in memory_limits())
    return min([int(psutil.virtual_memory().total), *limits])


def machine() -> str:
    """Tells machines apart; containers of one machine are on the same."""
    with suppress(OSError):  # not there, or not for this process
        return _BOOT_ID.read_text().strip()
    return os.uname().nodename


def staging_slab(nbytes: int) -> Slab:
    """Memory that many transfers pass through: in huge pages, which made them twice as fast."""
    return Slab(nbytes)


def plain_slab(nbytes: int) -> Slab:
    """Page-aligned memory in pages of the ordinary size, touched when it is used.

    For much memory at once: when memory is fragmented the kernel moves other pages about to make
    huge ones, in the middle of a fault.
    """
    return Slab(nbytes, huge_pages=False)


def check_engine(engine: object) -> None:
    """Raises TypeError for what is no engine; None is one that is made for the call."""
    if engine is not None and not callable(getattr(engine, "submit", None)):
        raise TypeError(f"engine is a {type(engine).__name__}, not an aio.Engine; leave it out")


class KeptMemory:
    """A slab that is kept from one use to the next, so that its pages are touched only once.

    Not for two uses at a time: what is still in use is left to it, and new memory taken.
    """

    def __init__(self) -> None:
        self._slabs: list[Slab] = []  # one at the most, taken and put here in one step

    def take(self, nbytes: int) -> Slab:
        """A slab with at least `nbytes` free, which no other thread is given before `keep`: what
        is free of it now would be taken twice.
        """
        try:
            slab = self._slabs.pop()
        except IndexError:
            return plain_slab(nbytes)
        if slab.largest_free_bytes < nbytes:
            del slab  # gives the old memory back before there is more
            slab = plain_slab(nbytes)
        return slab

    def keep(self, slab: Slab) -> None:
        """For the next use."""
        self._slabs[:] = [slab]
