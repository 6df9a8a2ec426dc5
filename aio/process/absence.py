"""Telling what is not there from what cannot be looked at now: only the first may be forgotten.

`Path.exists` and `Path.is_dir` of Python 3.14 take both for the same.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Of a path that leads nowhere, and will not lead anywhere at the next try."""


def is_absent(error: OSError) -> bool:
    """Whether an error says that there is nothing, and not that it could not be found out."""
    return error.errno in _ABSENT


def is_name(text: str) -> bool:
    """Whether a file can have this path: JSON has texts that no file system has."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def status_of(path: Path, *, follow: bool = True) -> os.stat_result | None:
    """None where nothing is. Raises OSError where that cannot be found out."""
    try:
        return path.stat(follow_symlinks=follow)
    except OSError as error:
        if is_absent(error):
            return None
        raise
    except ValueError:  # no name that a file can have
        return None


def is_there(path: Path) -> bool:
    """Whether a path leads to anything. Raises OSError where that cannot be found out."""
    return status_of(path) is not None


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory. Raises as `is_there`."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file. Raises as `is_there`."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)
