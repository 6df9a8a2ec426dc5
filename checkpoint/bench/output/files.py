"""Files of results."""

from __future__ import annotations

import errno
from pathlib import Path

from aio.errors import naming
from checkpoint.directory.files.replacing import replace_durably

_NO_PLACE_BESIDE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
"""What a file may be written to in spite of: its folder is not, or it is mounted alone."""


def write_output(path: Path, data: bytes) -> None:
    """Puts a file in the place of the one before, which stays where there is no room; what is no
    file (a pipe, a device) is written to. Raises OSError that names it.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            replace_durably(path, data)
        except OSError as error:
            if error.errno not in _NO_PLACE_BESIDE:
                raise
            path.write_bytes(data)
