"""Files as the engine sees them: one direct and one buffered descriptor on the same inode.

Whole pages go through the direct descriptor, edges through the buffered one; aio/csrc/blocks.h
says why the two never meet in a page. Opening raises what os.open raises (FileNotFoundError,
PermissionError, FileExistsError, ...); everything later is an AioError, or a ValueError for a
mistake of the caller.
"""

import contextlib
import errno
import functools
import itertools
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from aio._native import ffi, lib
from aio.errors import AioError, check_int, check_path, naming, own_errno
from aio.opening import Direct, Mode, Opening, warn_unreserved
from aio.process.descriptors import Descriptor
from aio.process.threads import LOOK_SECONDS, Changes, Latch
from aio.process.unasked import FirstError, tell

# The kernel counts in signed 64-bit integers.
MAX_OFFSET = (1 << 63) - 1
# Signals by which one allocation lets itself be interrupted: where each makes the file system start
# anew, those of a timer could keep it from ever ending.
_MAX_INTERRUPTIONS = 8


class Owner(Protocol):
    """What a file asks of the engine that it belongs to."""

    lock: threading.RLock
    changes: Changes
    """A closed file has no operation left."""
    open_files: "set[weakref.ref[File]]"
    """What warns of a file that is dropped before it is closed."""

    def is_forked(self) -> bool:
        """Whether this process is a child of the engine's."""

    def check_process(self) -> None:
        """RuntimeError in a child of the engine's process."""

    def on_reaper(self) -> bool:
        """Whether this thread reaps completions: it must not wait for them."""

    def close_if_unused(self, file: "File") -> None:
        """For whoever has used a file: closes it if only that was waited for."""


class File:
    """An open file of one engine. Engine.open makes them.

    Thread-safe. The engine keeps it while operations on it are in flight.
    """

    def __init__(self, core: Owner, path: Path, mode: Mode) -> None:
        """Opens nothing yet: see `open`."""
        self.path = path
        self.mode = mode
        # Tokens of operations; guarded by the core's lock, as is_closed is.
        self.in_flight: set[int] = set()
        # Calls on the file that have not returned, and the threads they are in.
        self.uses: dict[object, int] = {}
        self.is_closed = True  # until `open` has worked
        self._core = core
        self._sync_errno = 0  # of the first sync that failed
        # Of an operation's error. When a disk is full, a whole batch fails for the same reason.
        self.first_error = FirstError()
        self._opening = Opening(path, mode)
        self._direct = Direct(None, 1, 1, "")
        self.device = 0
        """The number of the device that the file is on, once it is open."""
        self._native: Any = None
        self._watch: weakref.ref[File] | None = None

    def open(self, block_bytes: int) -> None:
        """For Engine.open, which begins or abandons the file next, and for what it raises. Changes
        no file that exists.
        """
        self._opening.open()
        self._direct = self._opening.open_direct()
        self.device = self._status().st_dev
        if block_bytes % self._direct.offset:
            raise ValueError(
                f"block_bytes={block_bytes} is not a multiple of {self._direct.offset}, the"
                f" alignment of {self.path}"
            )
        direct = self._direct.descriptor
        native = ffi.gc(ffi.new("aio_file **"), lib.aio_file_drop)
        if error := -lib.aio_file_new(
            native,
            -1 if direct is None else direct.number,
            self._fd,
            self._direct.memory,
            self._direct.offset,
            self._size(),
        ):
            raise OSError(error, os.strerror(error), os.fspath(self.path))
        self._native = native
        self.is_closed = False

    def begin(self, size: int | None) -> None:
        """For Engine.open: empties what was there in mode "w", and reserves `size` bytes."""
        is_device = stat.S_ISBLK(self._status().st_mode)
        if self.mode == "w" and not self._opening.has_created and not is_device:
            self.truncate(0)
        if size:
            self.allocate(0, size)
        self._warn_if_dropped()

    def _warn_if_dropped(self) -> None:
        # A reference, for a finalizer would run for closed files as well: Python swallows what
        # interrupts it. Without a cycle, `warnings` is all that is called.
        warn = functools.partial(warnings.warn, f"{self!r} was never closed", ResourceWarning, 1)
        self._watch = weakref.ref(self, warn)
        self._core.open_files.add(self._watch)

    def leave_open(self) -> None:
        """Has the last reference close the file, and no ResourceWarning say so."""
        if self._watch is not None:
            self._core.open_files.discard(self._watch)
            self._watch = None

    def _forget(self) -> None:
        """The file is closed, and may be dropped."""
        self.is_closed = True
        self.leave_open()

    def abandon(self, why: BaseException) -> None:
        """For Engine.open, which fails with `why`: as if it had never been called."""
        self._forget()
        try:
            self._opening.undo(why)
        finally:
            self.close_descriptors()

    @property
    def _fd(self) -> int:
        return self._opening.buffered.number

    @property
    def direct(self) -> bool:
        """Whether whole pages bypass the page cache."""
        return not self._direct.reason

    @property
    def direct_reason(self) -> str:
        """Why there is no direct I/O; empty where there is."""
        return self._direct.reason

    @property
    def memory_alignment(self) -> int:
        """Of addresses that the device takes without a copy, in bytes; 1 without direct I/O."""
        return self._direct.memory

    @property
    def offset_alignment(self) -> int:
        """Of offsets and lengths for direct I/O, in bytes; 1 without direct I/O."""
        return self._direct.offset

    def size(self) -> int:
        """The file's length now, in bytes."""
        with self._used():
            return self._size()

    def _size(self) -> int:
        status = self._status()
        if stat.S_ISBLK(status.st_mode):
            return os.lseek(self._fd, 0, os.SEEK_END)
        return status.st_size

    def _status(self) -> os.stat_result:
        with naming(self.path):
            return os.fstat(self._fd)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserves space for a range and makes the file reach its end, zeros where nothing was.

        Raises AioError, ENOSPC among others; the file then has its old length, or that of a
        write that has made it longer, through any engine of this process. (Another process must
        not make it longer meanwhile.) RuntimeError in a forked child, as for a transfer. Where the
        file system cannot reserve, the file is made longer only, with one warning for all of its
        files.
        """
        offset, nbytes = self._check_writable("allocate space in", offset=offset, nbytes=nbytes)
        if offset < 0 or not 0 <= nbytes <= MAX_OFFSET - offset:
            raise ValueError(f"cannot allocate {nbytes} bytes at offset {offset} of {self.path}")
        tries = itertools.count()
        error = -self._call(
            lambda native: lib.aio_file_allocate(
                native, offset, nbytes, next(tries) > _MAX_INTERRUPTIONS
            )
        )
        if error == errno.EOPNOTSUPP:
            error = self._extend(offset + nbytes)
        if error:
            raise self._error("allocate", error, offset, nbytes)

    def zero(self, offset: int, nbytes: int) -> bool:
        """Makes a range that is part of the file zeros without writing them; False, and nothing is
        done, where the file system cannot. No transfer of the range may be in flight.

        Raises AioError.
        """
        offset, nbytes = self._check_writable("zero", offset=offset, nbytes=nbytes)
        if offset < 0 or not 0 <= nbytes <= MAX_OFFSET - offset:
            raise ValueError(f"cannot zero {nbytes} bytes at offset {offset} of {self.path}")
        error = -self._call(lambda native: lib.aio_file_zero(native, offset, nbytes))
        if error not in (0, errno.EOPNOTSUPP):
            raise self._error("zero", error, offset, nbytes)
        return not error

    def _extend(self, end: int) -> int:
        """0 or an errno."""
        warn_unreserved(self.device, self.path.parent)
        return -self._call(lambda native: lib.aio_file_extend(native, end))

    def _call(self, function: Callable[[Any], int]) -> int:
        """Calls C with the file, which `close` waits for. ValueError when it is closed.

        A call that a signal interrupts is made again once its handler, which may raise, has run.
        C locks the file: a lane of the parent's may have had it locked when this child was made.
        """
        self._core.check_process()
        with self._used():
            while (result := function(self._native[0])) == -errno.EINTR:
                pass
            return result

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Inside, no other thread closes the descriptors: their numbers would soon be another's.

        ValueError when the file is closed.
        """
        core = self._core
        if core.is_forked():  # the lock may be the parent's
            self.check_open()
            yield
            return
        use = object()
        try:
            with core.lock:
                self.check_open()
                self.uses[use] = threading.get_ident()
            yield
        finally:
            self.uses.pop(use, None)
            core.close_if_unused(self)

    @property
    def is_unused(self) -> bool:
        """For the engine: nobody needs the descriptors any more."""
        return not self.in_flight and not self.uses

    def _change_unless_closable(self) -> Latch | None:
        """None if nothing is left to wait for: for a call that this thread is in (a handler
        interrupted it, or its end) nobody can wait.
        """
        here = threading.get_ident()
        with self._core.lock:
            if not self.in_flight and all(thread == here for thread in self.uses.values()):
                return None
            return self._core.changes.next()

    def truncate(self, nbytes: int) -> None:
        """Makes the file exactly this long. Raises AioError; RuntimeError in a forked child."""
        (nbytes,) = self._check_writable("truncate", nbytes=nbytes)
        if not 0 <= nbytes <= MAX_OFFSET:
            raise ValueError(f"cannot truncate {self.path} to {nbytes} bytes")
        if error := -self._call(lambda native: lib.aio_file_truncate(native, nbytes)):
            message = f"cannot truncate {self.path} to {nbytes} bytes: {os.strerror(error)}"
            raise AioError(message, errno=error, filename=os.fspath(self.path))

    def sync(self) -> None:
        """Makes durable what operations that have ended wrote, and the file's length.

        A new file also needs sync_directory() on its folder. Raises AioError; since the kernel
        reports a lost page once only, a file whose sync failed once fails every time after.
        """
        with self._used():
            if not self._sync_errno:
                try:
                    os.fsync(self._fd)
                    return
                except OSError as error:
                    self._sync_errno = own_errno(error)
        raise AioError(
            f"cannot sync {self.path}: {os.strerror(self._sync_errno)}; what was written to it may"
            " be lost, write it again to another file",
            errno=self._sync_errno,
            filename=os.fspath(self.path),
        )

    def close(self) -> None:
        """Waits for the operations on this file and closes its descriptors. Idempotent.

        Inside a callback it does not wait: the last operation closes them.
        """
        core = self._core
        if core.is_forked():
            # The operations are the parent's, and so may be the lock. The descriptors are ours.
            self._forget()
            self.close_descriptors()
            return
        with core.lock:
            self._forget()
        while not core.on_reaper() and (change := self._change_unless_closable()) is not None:
            change.wait(LOOK_SECONDS)
        core.close_if_unused(self)
        tell()

    def close_descriptors(self) -> None:
        """For the engine, with its lock held and nothing in flight; again after an interrupt."""
        self._native = None
        try:
            if self._direct.descriptor is not None:
                self._direct.descriptor.close()
        finally:
            self._opening.buffered.close()

    def direct_was_refused(self) -> bool:
        """For the engine: the kernel would not transfer directly what kept the alignments.

        Whether that is news, of which the engine then warns.
        """
        is_news = not self._direct.reason
        if is_news:
            self._direct = self._direct._replace(reason="the kernel refused a direct transfer")
        return is_news

    def native_for(self, core: Owner, kind: str) -> Any:
        """The C file, for a transfer of this kind by that engine. ValueError when it may not."""
        self.check_open()
        if core is not self._core:
            raise ValueError(f"{self.path} was opened by another engine: open it with this one")
        if kind == "write":
            self._check_writable("write to")
        elif kind != "read":
            raise ValueError(f'a request is a "read" or a "write", not {kind!r}')
        native = self._native
        if native is None:  # closed since the look above
            raise ValueError(f"{self.path} is closed")
        return native[0]

    def check_open(self) -> None:
        if self.is_closed:
            raise ValueError(f"{self.path} is closed")

    def _check_writable(self, action: str, **numbers: int) -> list[int]:
        """Gives the numbers, as those of Python."""
        self.check_open()
        given = [check_int(name, number) for name, number in numbers.items()]
        if self.mode == "r":
            raise ValueError(
                f'cannot {action} {self.path}: it was opened with mode "r", open it with "r+"'
            )
        return given

    def _error(self, action: str, code: int, offset: int, nbytes: int) -> AioError:
        return AioError(
            f"cannot {action} {nbytes} bytes at offset {offset} of {self.path}:"
            f" {os.strerror(code)}",
            errno=code,
            filename=os.fspath(self.path),
            offset=offset,
            nbytes=nbytes,
        )

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<File {self.path}, {'closed' if self.is_closed else f'mode {self.mode!r}'}>"


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes durable which names a directory has: after creating, renaming or removing in it.

    Raises what os.open raises for the directory, and AioError when the sync fails.
    """
    check_path("path", path)
    with Descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        try:
            os.fsync(directory.number)
        except OSError as error:
            name = os.fspath(path)
            message = f"cannot sync directory {name}: {error.strerror}"
            raise AioError(message, errno=own_errno(error), filename=name) from error
