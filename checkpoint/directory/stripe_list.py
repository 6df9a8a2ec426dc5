"""`stripes.json`: the directories that a save made elsewhere, and how to tell one that is gone from
one on a disk that is not mounted.

Of each directory that it was made in the list has the inode number, which moves and mounts keep: a
mount point without its disk has another one.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio import read_regular_file
from aio.process.absence import is_absent, is_name, status_of

STRIPES_NAME = "stripes.json"
_MAX_STRIPES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ListedStripe:
    """A directory made elsewhere; `inode` is of the one that it was made in, None if not known."""

    path: Path
    inode: int | None

    def is_away(self) -> bool:
        """Whether it may be on a disk that is not mounted now, or was moved with what it lies in,
        rather than have been removed. Raises OSError where that cannot be found out.
        """
        status = status_of(self.path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            return False
        try:
            found = self.path.parent.stat().st_ino
        except OSError:
            return True
        return self.inode is not None and self.inode != found


def encode_stripes(stripes: Sequence[Path]) -> bytes:
    """The list for directories that are about to be made. Raises OSError for a missing parent."""
    inodes = [stripe.parent.stat().st_ino for stripe in stripes]
    return json.dumps([*map(str, stripes), {"inodes": inodes}]).encode()


def listed_stripes(home: Path, uuid: str) -> list[ListedStripe]:
    """Directories elsewhere that the generation at `home` lists; damaged lists give what can be
    used. Raises OSError for one that cannot be read: there may be directories that it lists.
    """
    try:
        raw = read_regular_file(home / STRIPES_NAME, _MAX_STRIPES_BYTES, follow=False)
        content: Any = json.loads(raw)
    except OSError as error:
        if is_absent(error):  # there are none
            return []
        raise
    except (ValueError, RecursionError):  # cut off before it was durable: none had been made
        return []
    if not isinstance(content, list):
        return []
    paths = [item for item in content if isinstance(item, str) and is_name(item)]
    inodes = _inodes(content[-1] if content else None, len(paths))
    listed = [ListedStripe(Path(path), inode) for path, inode in zip(paths, inodes, strict=True)]
    return [
        stripe
        for stripe in listed
        if stripe.path.is_absolute() and stripe.path.name.endswith(f".{uuid}")
    ]


def _inodes(last: Any, count: int) -> list[int | None]:
    inodes = last.get("inodes") if isinstance(last, dict) else None
    if not isinstance(inodes, list) or len(inodes) != count:
        return [None] * count
    return [inode if type(inode) is int else None for inode in inodes]
