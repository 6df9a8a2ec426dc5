"""One descriptor and the object that owns it, and files that go with theirs."""

import errno
import os

from aio._native import ffi, lib
from aio.errors import AioError


class Descriptor:
    """A descriptor, closed once: by `close`, on leaving a `with`, or with its last reference.

    C opens and closes it, each in one call. So there is no moment in which an interrupt finds it
    open and owned by nobody; and letting go of it runs no Python, which would swallow one. The
    number is given up before close(2) is called: what fails in there may cost the descriptor, but
    never closes a second time what may be another thread's file by then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        flags: int = 0,
        mode: int = 0o666,
        *,
        exact: bool = False,
        dir_fd: int | None = None,
    ) -> None:
        """Opens `path`, if there is one, as `open` does."""
        self._name = ""
        self._native = ffi.gc(ffi.new("aio_descriptor *", {"number": -1}), lib.aio_descriptor_close)
        if path is not None:
            self.open(path, flags, mode, exact=exact, dir_fd=dir_fd)

    def open(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o666,
        *,
        exact: bool = False,
        dir_fd: int | None = None,
        called: str | os.PathLike[str] | None = None,
    ) -> None:
        """Opens `path`, close-on-exec. `exact` refuses one that is a symbolic link (ELOOP);
        a relative one is looked up in the directory `dir_fd`, if that is given.

        Raises what os.open raises; it names the path, or what that is `called`.
        """
        assert self.number < 0
        name = os.fsencode(path)
        if b"\0" in name:
            raise ValueError("embedded null byte")
        self._name = os.fsdecode(path if called is None else called)
        flags |= os.O_CLOEXEC | (os.O_NOFOLLOW if exact else 0)
        place = -1 if dir_fd is None else dir_fd
        error = errno.EINTR
        while error == errno.EINTR:  # between two tries handlers of signals run, which may raise
            error = -lib.aio_descriptor_open(self._native, place, name, flags, mode)
        if error:
            raise OSError(error, os.strerror(error), self._name)

    @property
    def number(self) -> int:
        """-1 while it is not open."""
        return int(self._native.number)

    def close(self) -> None:
        """Idempotent. Raises AioError; it is closed then, too."""
        if error := -lib.aio_descriptor_close(self._native):
            raise AioError(
                f"cannot close {self._name}: {os.strerror(error)}; what was written to it since it"
                " was synced may be lost",
                errno=error,
                filename=self._name,
            )

    def punch(self, offset: int, nbytes: int) -> bool:
        """Gives the space of a range back to the file system: it reads as zeros then, and the file
        is as long as before. False where the file system cannot. Raises AioError.
        """
        error = errno.EINTR
        while error == errno.EINTR:
            error = -lib.aio_descriptor_punch(self._native, offset, nbytes)
        if error in (0, errno.EOPNOTSUPP):
            return not error
        raise AioError(
            f"cannot give back {nbytes} bytes at offset {offset} of {self._name}:"
            f" {os.strerror(error)}",
            errno=error,
            filename=self._name,
            offset=offset,
            nbytes=nbytes,
        )

    def __enter__(self) -> "Descriptor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Temporary(Descriptor):
    """A new file to write, removed by `discard` or with the last reference to this.

    One that was given another name stays. A forked child removes nothing. As with a descriptor,
    letting go of it runs no Python.
    """

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        """Raises what os.open raises."""
        super().__init__()
        self._whole = ffi.gc(
            ffi.new("aio_temporary *", {"descriptor": {"number": -1}}), lib.aio_temporary_drop
        )
        self._native = ffi.addressof(self._whole, "descriptor")
        self._name = os.fspath(path)
        error = errno.EINTR
        while error == errno.EINTR:  # as in `open`
            error = -lib.aio_temporary_create(self._whole, os.fsencode(path), mode)
        if error:
            raise OSError(error, os.strerror(error), self._name)

    def discard(self) -> None:
        """Removes the file, if it has its name still, and closes it. Idempotent. Raises OSError."""
        if error := -lib.aio_temporary_drop(self._whole):
            raise OSError(error, os.strerror(error), self._name)
