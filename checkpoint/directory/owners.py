"""Which checkpoint owns a directory of data on a stripe.

The directory of a save on a stripe holds `owner.json`, which names the list of stripes of that save
by its path, in which the id of the save is, and by what moves with it and is in no copy of it: its
inode number and the time of its last change. So a checkpoint that was renamed or mounted elsewhere
owns its data, and a copy of it does not; neither does a list that somebody made up. That time
counts only where the list is not in its place: chmod, chown and hard links change it.

Invariants: what is not owned is never deleted; links are never followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio import read_regular_file
from aio.process.absence import is_absent, is_name, status_of
from aio.process.descriptors import Descriptor

OWNER_NAME = "owner.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Owner:
    """The list of stripes at `path`, as `owner.json` names it."""

    path: str
    inode: int
    changed: int

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that it was made for, where that was then."""
        return Path(self.path).parent.parent

    def encode(self) -> bytes:
        """The content of `owner.json`."""
        node = {"stripes": self.path, "inode": self.inode, "changed": self.changed}
        return json.dumps(node).encode()

    def is_at(self, path: Path) -> bool:
        """Whether the list at `path` is this one: moved perhaps, but no copy.

        In its place it is the one by its inode. Elsewhere a list that has changed is this one only
        if it is also in its place, by a mount and not by a hard link. Of a snapshot of a whole file
        system, which copies inodes, the original counts if it is still there. Raises OSError where
        that cannot be found out.
        """
        found = status_of(path, follow=False)
        original = status_of(Path(self.path), follow=False)
        if found is None or found.st_ino != self.inode:
            return False
        if original is not None and os.path.samestat(original, found):
            return str(path) == self.path or self._is(found) or found.st_nlink == 1
        return self._is(found) and (original is None or not self._is(original))

    def _is(self, status: os.stat_result) -> bool:
        return (status.st_ino, status.st_ctime_ns) == (self.inode, self.changed)


def owner_at(path: Path) -> Owner:
    """The owner that the list at `path` makes. Raises OSError."""
    status = path.lstat()
    return Owner(str(path), status.st_ino, status.st_ctime_ns)


def read_owner(directory: int) -> Owner | None:
    """What `owner.json` of an open directory says; None if it says nothing that can be trusted.

    Raises OSError for one that cannot be read.
    """
    try:
        raw = read_regular_file(OWNER_NAME, _MAX_BYTES, follow=False, dir_fd=directory)
        node: Any = json.loads(raw)
    except OSError as error:
        if is_absent(error):
            return None
        raise
    except (ValueError, RecursionError):
        return None
    if not isinstance(node, dict):
        return None
    path, inode, changed = (node.get(key) for key in ("stripes", "inode", "changed"))
    if not isinstance(path, str) or type(inode) is not int or type(changed) is not int:
        return None
    return Owner(path, inode, changed) if is_name(path) else None


@contextmanager
def opened_directory(path: Path) -> Iterator[int | None]:
    """A descriptor of a directory; None for a link, for anything else, and where nothing is.

    Errors of the body name the directory, or what is in it, by its whole path.
    """
    try:
        directory = Descriptor(path, os.O_RDONLY | os.O_DIRECTORY, exact=True)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    with directory:
        try:
            yield directory.number
        except OSError as error:
            # What is in the directory is called by its name there.
            if error.errno is not None:
                name = error.filename if isinstance(error.filename, str) else ""
                error.filename = str(path / name)
            raise
