"""Files that take the place of others: beside them, under their own names, until they are whole,
with their permissions, and their owner as far as that may be.

Invariants: who writes a `Replacement` holds a `flock` on it, so that what killed processes left can
be told; who may not read an old file does not read the new one either, not while it is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path

from aio import Engine, File, naming, sync_directory
from aio.process.descriptors import Descriptor, Temporary
from checkpoint.directory.files.attributes import PRIVATE, Attributes, give_attributes

_MAX_NAME_BYTES = 220
"""Of a name that is part of another one, which may have 255."""


class Replacement:
    """A new empty file at `temporary`, which `commit` gives the name `path` and `discard` removes.

    With its last reference it is discarded, by C: an interrupt in a finalizer of Python's would be
    swallowed. It has the owner, as far as that may be, and the permissions of the file that it
    replaces. What killed processes left that were to replace the same file is removed.

    Raises OSError; a directory, a device or a pipe is not replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._replaced = _attributes_of_replaced(path)
        _remove_abandoned(path)
        mode = 0o666 if self._replaced is None else PRIVATE
        self.temporary, self._file = _create(path, mode)

    def give_attributes(self) -> None:
        """Those of the file that it replaces; to be called when it needs not be opened any more,
        and before it is synced.
        """
        give_attributes(self._file.number, self._replaced, self.path)

    def commit(self) -> None:
        """Durably, if the content is. Raises OSError."""
        self.temporary.replace(self.path)
        self._file.close()
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Idempotent. A forked child leaves alone what its parent writes."""
        self._file.discard()


def replace_durably(path: Path, data: bytes) -> None:
    """Puts a file of this content in the place of another, or makes one. Raises OSError."""
    replacement = Replacement(path.resolve())
    try:
        with replacement.temporary.open("wb") as file:
            file.write(data)
            file.flush()
            replacement.give_attributes()
            os.fsync(file.fileno())
        replacement.commit()
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        raise OSError(error.errno, what, str(replacement.path)) from error
    finally:
        replacement.discard()


def _attributes_of_replaced(path: Path) -> Attributes | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        what = "a device or a pipe is not replaced by a file; open it with open()"
        raise OSError(errno.EINVAL, what, str(path))
    return Attributes.of(status)


def _create(path: Path, mode: int) -> tuple[Path, Temporary]:
    """A new file beside `path`, locked: its path and what holds it."""
    while True:
        temporary = path.with_name(f".{_stem(path)}.{secrets.token_hex(4)}.tmp")
        file = Temporary(temporary, mode)
        # Until it is locked another process may take it for abandoned.
        with contextlib.suppress(BlockingIOError), naming(temporary):
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.number).st_nlink:
                return temporary, file
        file.discard()


def _remove_abandoned(path: Path) -> None:
    """Removes what killed processes left that were to replace the file at `path`."""
    pattern = re.compile(re.escape(f".{_stem(path)}.") + r"[0-9a-f]{8}\.tmp")
    entries: list[Path] = []
    with contextlib.suppress(PermissionError):  # where files may be made and not listed
        entries.extend(path.parent.iterdir())
    for entry in entries:
        if pattern.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # it is being written, or is somebody else's
                _remove_if_unlocked(entry)


def _remove_if_unlocked(path: Path) -> None:
    with Descriptor(path, os.O_RDONLY | os.O_NONBLOCK, exact=True) as descriptor:
        if stat.S_ISREG(os.fstat(descriptor.number).st_mode):
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _stem(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:_MAX_NAME_BYTES])


def open_new(engine: Engine, path: Path, nbytes: int, replaced: Attributes | None) -> File:
    """A new file of this size; without one to replace it has what the process gives new files.

    Raises what `Engine.open` does; a file that is there then is for the caller to remove.
    """
    if replaced is None:
        return engine.open(path, "x", size=nbytes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with Descriptor(path, flags, PRIVATE) as made:
        file = engine.open(path, "w", size=nbytes)
        try:
            give_attributes(made.number, replaced, path)
        except BaseException:
            file.close()
            raise
    return file
