"""A path that cannot be looked at, for a moment, as Python 3.14 tells of it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


def _as_in_python_3_14(name: str) -> Callable[[Path], bool]:
    """What cannot be looked at is taken for what is not there."""
    method = getattr(Path, name)

    def told(path: Path) -> bool:
        try:
            return bool(method(path))
        except OSError:
            return False

    return told


@contextmanager
def unread(failing: Path) -> Iterator[None]:
    """Inside, its disk does not answer."""
    status_of = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        if path == failing:
            raise OSError(errno.EIO, "the disk does not answer", str(path))
        return status_of(path, **options)

    told: dict[str, Any] = {n: _as_in_python_3_14(n) for n in ("exists", "is_file", "is_dir")}
    with patch.multiple(Path, stat=stat, **told):
        yield
