"""Files of results."""

from __future__ import annotations

from pathlib import Path

from aio.errors import naming
from checkpoint.directory.replacing import replace_durably


def write_output(path: Path, data: bytes) -> None:
    """Puts a file in the place of the one before, which stays where there is no room; what is no
    file (a pipe, a device) is written to. Raises OSError that names it.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            replace_durably(path, data)
