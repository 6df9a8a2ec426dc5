"""Opening a file: its descriptors, all on one inode, and what a failed open takes back.

A path is looked up with O_PATH, which waits for nobody, as opening a pipe does, and does nothing to
a device. Only what turns out to be a regular file or a block device is then opened, through that
descriptor: by the second look its name may mean something else.
"""

import contextlib
import errno
import fcntl
import io
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from aio._native import ffi, lib
from aio.errors import NotRegularFileError, may_be_of_a_handler, naming
from aio.process.descriptors import Descriptor

logger = logging.getLogger(__name__)
T = TypeVar("T")

Mode = Literal["r", "r+", "w", "x"]
MODES = ("r", "r+", "w", "x")
_DESCRIPTORS = Path("/proc/self/fd")
# What direct I/O needs where nobody tells: no device in use asks for more.
_ASSUMED_ALIGNMENT = 4096
# How often a file may come and go between looking for it and creating it.
_MAX_RACES = 16
# How open(2) says that a file has no direct I/O, or none for this process. Anything else, such as
# too many open files, is an error that has nothing to do with the file.
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM})


class Direct(NamedTuple):
    """A descriptor for direct I/O, its alignments in bytes, or why there is none."""

    descriptor: Descriptor | None
    memory: int
    offset: int
    reason: str


class Opening:
    """A file while it is being opened. Whatever interrupts that, `undo` finds all there is."""

    def __init__(self, path: Path, mode: Mode) -> None:
        self.path = path
        self._mode = mode
        self._access = os.O_RDONLY if mode == "r" else os.O_RDWR
        self.buffered = Descriptor()
        self._created: Path | None = None  # what `buffered` creates, once it is open

    def open(self) -> None:
        """Opens `buffered`, and creates the file if the mode says so; "w" does not yet empty it.

        Raises what os.open raises, IsADirectoryError, and ValueError for what is neither a regular
        file nor a block device.
        """
        if self._mode == "x":
            self._create(self.path)
        elif self._mode == "w":
            self._open_or_create()
        else:
            self._open_existing()

    @property
    def has_created(self) -> bool:
        return self._created is not None and self.buffered.number >= 0

    def _open_existing(self) -> None:
        self._created = None
        with Descriptor(self.path, os.O_PATH) as place:
            _check_kind(place.number, self.path)
            self.buffered = _reopen(place.number, self.path, self._access)

    def _create(self, path: Path) -> None:
        self._created = path
        self.buffered.open(path, self._access | os.O_CREAT | os.O_EXCL)

    def _open_or_create(self) -> None:
        races = 0
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._open_existing()
            try:
                return self._create(_target_of(self.path))
            except FileExistsError:  # somebody else has created it since
                races += 1
                if races == _MAX_RACES:
                    raise

    def open_direct(self) -> Direct:
        """Opens the same inode for direct I/O, where it has that. Raises OSError."""
        return _open_direct(self.buffered.number, self.path, self._access)

    def undo(self, why: BaseException) -> None:
        """Removes the file, if this has created it, and closes it."""
        try:
            if self._created is not None and self.buffered.number >= 0:
                _remove(self._created, self.buffered.number)
        except OSError as error:
            why.add_note(f"{self._created} was created, and cannot be removed again: {error}")
        finally:
            self.buffered.close()


@contextlib.contextmanager
def open_regular_file(
    path: str | os.PathLike[str], *, follow: bool = True, dir_fd: int | None = None
) -> Iterator[tuple[BinaryIO, int]]:
    """A file to read, and its size. A pipe or a device of this name would block or never end, so
    the kind is looked at first; without `follow` a link is refused (ELOOP). A relative path is
    looked up in the directory `dir_fd`, if that is given.

    Raises NotRegularFileError, and OSError, which names the path also where reading failed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    with (
        naming(path),
        Descriptor(path, flags, exact=not follow, dir_fd=dir_fd) as descriptor,
    ):
        status = os.fstat(descriptor.number)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularFileError(f"{os.fspath(path)} is not a regular file")
        with io.BufferedReader(_Raw(descriptor.number, "rb", closefd=False)) as file:
            yield file, status.st_size


class _Raw(io.FileIO):
    """Python gives None for EAGAIN, which nobody expects of a file."""

    def readinto(self, buffer: Any, /) -> int:
        filled: int | None = super().readinto(buffer)
        return _checked(filled)

    def readall(self) -> bytes:
        return _checked(super().readall())


def _checked(result: T | None) -> T:
    if result is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return result


def read_regular_file(
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    follow: bool = True,
    dir_fd: int | None = None,
) -> bytes:
    """What is in a file, of a large one no more than `limit` bytes. Raises as
    `open_regular_file`, and OSError (EIO) for one that ends before its size: read as empty, it
    would say that there is nothing.
    """
    with open_regular_file(path, follow=follow, dir_fd=dir_fd) as (file, size):
        data = file.read(-1 if limit is None else limit)
        if len(data) < (size if limit is None else min(size, limit)):
            raise OSError(errno.EIO, f"the file ends behind {len(data)} of its {size} bytes")
        return data


def _target_of(path: Path) -> Path:
    """Where a file is created: O_EXCL follows no link, and "w" is to create what one leads to."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _remove(path: Path, fd: int) -> None:
    """Removes `path` if it still is what `fd` is open on."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.unlink()


def _check_kind(fd: int, path: Path) -> None:
    with naming(path):
        mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise ValueError(f"{path} is neither a regular file nor a block device")


def _reopen(fd: int, path: Path, flags: int) -> Descriptor:
    """Another descriptor on the inode of `fd`, which `path` has led to."""
    again = Descriptor()
    with contextlib.suppress(FileNotFoundError):  # where /proc is not mounted
        again.open(_DESCRIPTORS / str(fd), flags, called=path)
        return again
    again.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    with naming(path):
        if not os.path.samestat(os.fstat(fd), os.fstat(again.number)):
            raise OSError(errno.ESTALE, "the name now means another file")
        # Queues would give up where they should wait.
        fcntl.fcntl(again.number, fcntl.F_SETFL, flags)
    return again


def _open_direct(fd: int, path: Path, access: int) -> Direct:
    alignment = ffi.new("aio_alignment *")
    if error := -lib.aio_file_alignment(fd, alignment):
        raise OSError(error, os.strerror(error), os.fspath(path))
    if alignment.known and not alignment.offset:
        return Direct(None, 1, 1, "the file system has none")
    try:
        direct = _reopen(fd, path, access | os.O_DIRECT)
    except OSError as refused:
        if refused.errno not in _NO_DIRECT:
            raise
        return Direct(None, 1, 1, f"open with O_DIRECT failed: {refused.strerror}")
    # Small files and mixed edges go through this descriptor a page at a time. Read-ahead would
    # only bring in pages that direct writes then have to throw out again.
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError as refusal:  # it is no more than advice
        if may_be_of_a_handler(refusal):
            raise
    if not alignment.known:
        return Direct(direct, _ASSUMED_ALIGNMENT, _ASSUMED_ALIGNMENT, "")
    return Direct(direct, alignment.memory, alignment.offset, "")


_buffered: set[tuple[int, str]] = set()
"""Devices of which this process was told that they have no direct I/O, and why."""


def warn_buffered(device: int, path: Path, reason: str) -> None:
    """The one warning about files without direct I/O: once for a file system and a reason, however
    many engines there are.
    """
    if (device, reason) in _buffered:
        return
    _buffered.add((device, reason))
    logger.warning(
        "%s: no direct I/O (%s), so its data goes through the page cache, which costs a copy,"
        " processor time and memory",
        path,
        reason,
    )


_unreserved: set[int] = set()
"""Devices of which this process was told that they cannot reserve space."""


def warn_unreserved(device: int, path: Path) -> None:
    """The one warning about a file system that cannot reserve space, however many files it has."""
    if device in _unreserved:
        return
    _unreserved.add(device)
    logger.warning(
        "%s: the file system cannot reserve space, so writes may find the disk full half way and"
        " are slower where they make a file longer",
        path,
    )
