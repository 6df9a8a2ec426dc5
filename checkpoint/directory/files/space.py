"""Whether there is room for a save, asked before it begins."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def check_space(wanted: Iterable[tuple[Path, int]]) -> None:
    """Raises OSError (ENOSPC) naming a directory and the bytes, if file systems lack the room.

    `wanted` are existing directories and the bytes that are to go into each; those on one file
    system are added up. File systems that do not tell their size are believed.
    """
    needed: dict[int, int] = defaultdict(int)
    place: dict[int, Path] = {}
    for directory, nbytes in wanted:
        device = directory.stat().st_dev
        needed[device] += nbytes
        place.setdefault(device, directory)
    for device, nbytes in needed.items():
        status = os.statvfs(place[device])
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and nbytes > free:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: the save needs {nbytes} bytes, {free} are free",
                str(place[device]),
            )
