"""Memory that stays where it is, as far as there is some."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

from aio._native import lib
from aio.errors import AioError
from aio.process.cgroups import memory_limits

logger = logging.getLogger(__name__)

_MEMORY = Path("/proc/meminfo")
_TABLE_PART = 512
"""One byte of so many is what the kernel itself takes for its tables of pages, at most."""
_SPARE_BYTES = 4 << 20
"""What a process takes that goes on with all the rest of its memory locked."""


def lock_memory(address: Any, nbytes: int, *, required: bool) -> None:
    """Has all of it there, and keeps it from being swapped out. Where that fails it is one warning,
    or an AioError where it is `required`.
    """
    available = available_bytes()
    taken = nbytes + nbytes // _TABLE_PART + _SPARE_BYTES
    if taken > available:  # the kernel would end processes for it
        error = errno.ENOMEM
        cause = f"{available} are available, and it takes {taken}"
    elif error := -lib.aio_lock_memory(address, nbytes):
        cause = f"{os.strerror(error)}; raise RLIMIT_MEMLOCK (ulimit -l)"
    else:
        return
    message = f"cannot lock {nbytes} bytes of memory: {cause}"
    if required:
        raise AioError(message, errno=error, nbytes=nbytes)
    logger.warning("%s, or the kernel may swap the buffers out and I/O waits for them", message)


def available_bytes() -> int:
    """What can be had without swapping, as far as the kernel tells: of the machine, and of what the
    control groups of this process give it.
    """
    left = [limit.left_bytes for limit in memory_limits()]
    if _MEMORY.exists():
        fields = _MEMORY.read_text(encoding="utf-8").split()
        left.append(int(fields[fields.index("MemAvailable:") + 1]) * 1024)
    return min(left, default=1 << 63)
