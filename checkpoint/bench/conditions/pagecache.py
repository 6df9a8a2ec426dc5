"""Makes timed reads come from the disk and not from memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

_DROP = Path("/proc/sys/vm/drop_caches")

Method = Literal["dropped", "advised"]


class PageCache:
    """`method` is "dropped" where the kernel's whole page cache can be dropped, which takes root,
    and "advised" where it can only be asked to forget single files.
    """

    def __init__(self, drop: Path | None = None) -> None:
        self._drop = drop or _DROP
        self.method: Method = "dropped" if self._try_to_drop() else "advised"

    def _try_to_drop(self) -> bool:
        try:
            self._drop.write_text("3")
        except OSError:
            return False
        return True

    def forget(self, folders: Iterable[Path]) -> None:
        """Forgets the files in these folders, after what is dirty of them has been written back."""
        for path in files_below(folders):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        if self.method == "dropped" and not self._try_to_drop():
            self.method = "advised"

    def describe(self) -> str:
        if self.method == "dropped":
            return "the page cache was dropped before every load"
        return (
            "without root the page cache could not be dropped; the kernel was asked to forget the "
            "files before every load, and may have kept some of them: run as root to be sure"
        )


def files_below(folders: Iterable[Path]) -> Iterator[Path]:
    """Every regular file in these folders, at any depth."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path
