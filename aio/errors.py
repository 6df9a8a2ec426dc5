"""The error of a transfer, of whatever else a file or the kernel refuses, and of arguments that are
of another type.
"""

import errno as errno_codes
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import TypeVar

import numpy as np

E = TypeVar("E", bound=BaseException)
_MAX_HANDLERS = 100
"""What comes more often comes each time."""
_NO_ROOM = (errno_codes.ENOSPC, errno_codes.EDQUOT, errno_codes.EFBIG)


class AioError(OSError):
    """An I/O error with the range it is about.

    `errno` and `filename` are as in every OSError. `offset` and `nbytes` are what was asked for,
    None where the failed call has no range (a sync, an engine's start). `transferred` counts the
    bytes from the start of the range that did move; some behind them may have moved as well.

    A read that meets the end of the file has errno ENODATA, and nothing else has: a medium that
    cannot be read, of which Linux says that where direct I/O reads, has EIO.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int,
        filename: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        transferred: int = 0,
    ) -> None:
        super().__init__(errno, os.strerror(errno), filename)
        self.message = message
        self.offset = offset
        self.nbytes = nbytes
        self.transferred = transferred

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # OSError would call the class with its own three arguments.
        fields = (self.errno, self.filename, self.offset, self.nbytes, self.transferred)
        return _rebuild, (type(self), self.message, *fields)


def advise(error: BaseException, remedy: str) -> None:
    """Have an `AioError` end in `remedy`, once; nothing happens to any other error."""
    if isinstance(error, AioError) and not error.message.endswith(remedy):
        error.message = f"{error.message}; {remedy}"


def _rebuild(
    kind: type[AioError],
    message: str,
    errno: int,
    filename: str | None,
    offset: int | None,
    nbytes: int | None,
    transferred: int,
) -> AioError:
    return kind(
        message,
        errno=errno,
        filename=filename,
        offset=offset,
        nbytes=nbytes,
        transferred=transferred,
    )


def transfer_error(
    kind: str, filename: str, offset: int, nbytes: int, *, errno: int, transferred: int
) -> AioError:
    """The AioError of a read or write that could not be completed."""
    reason = "end of file" if errno == errno_codes.ENODATA else os.strerror(errno)
    progress = f" after {transferred} bytes" if transferred else ""
    return AioError(
        f"cannot {kind} {nbytes} bytes at offset {offset} of {filename}: {reason}{progress}",
        errno=errno,
        filename=filename,
        offset=offset,
        nbytes=nbytes,
        transferred=transferred,
    )


def is_no_room(error: BaseException) -> bool:
    """Whether a file could not grow because of a full disk, a quota, or the largest size of files.

    Other places may have room, and so may this one when something of it is given back.
    """
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def may_be_repeated(error: BaseException, times: int) -> bool:
    """Whether to call once more what has raised this, and was called again so many times: the
    handler of a signal may have. One that surely has may come again and again (that of a
    `DataLoader` does for each worker that dies); an error of the call itself comes up again.
    """
    if not times:
        return may_be_of_a_handler(error)
    return times < _MAX_HANDLERS and _is_of_a_handler(error)


def may_be_of_a_handler(error: BaseException) -> bool:
    """Whether an error may have come from outside of the call that it was raised in, as an
    interrupt does: what the handler of a signal raises (of a timeout, or that of a `DataLoader`
    whose worker died). Those of the system have an errno.
    """
    return not isinstance(error, OSError) or error.errno is None or _is_of_a_handler(error)


def _is_of_a_handler(error: BaseException) -> bool:
    """Whether one that is installed now is where it came from."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def _code_of(handler: object) -> object:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__") and callable(handler):
        function = type(handler).__call__
    return getattr(function, "__code__", None)


def own_errno(error: OSError) -> int:
    """Of an error of a call itself; raises what the handler of a signal has raised in its midst."""
    if may_be_of_a_handler(error):
        raise error
    return error.errno or errno_codes.EIO


def check_int(name: str, value: object) -> int:
    """An argument that is a whole number, as one of Python: those of numpy have so many bits and no
    more, and what is counted with them comes out wrong. TypeError for what is none.
    """
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an int")
    return index(value)


def is_flag(value: object) -> bool:
    """Whether it is True or False, as Python has them or as comparisons of numpy give them."""
    return isinstance(value, bool | np.bool_)


def check_flag(name: str, value: object) -> bool:
    """An argument that is True or False, as Python has them. TypeError for what is neither."""
    if not is_flag(value):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not True or False")
    return bool(value)


def check_path(name: str, value: object) -> None:
    """Raises TypeError for an argument that is no path."""
    given = value.__fspath__() if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise TypeError(
            f"{name} is a {type(value).__name__}, not a path; give a str or an os.PathLike of str"
        )


def check_seconds(name: str, value: object) -> None:
    """Raises TypeError for an argument that is no time to wait: a number of seconds, or None; and
    ValueError for NaN, which never comes.
    """
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number of seconds")
    if value is not None and value != value:
        raise ValueError(f"{name}={value!r} is not a number of seconds")


class NotRegularFileError(ValueError):
    """A directory, a pipe or a device is where a file is to be read."""


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lets errors of the body that name no file name `path`: those of calls on descriptors."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error.filename, str | bytes):
            error.filename = os.fspath(path)
        raise


def let_go(error: E) -> E:
    """The same error, which can be kept now: what it came through holds nothing any more.

    A traceback keeps the local variables of every frame that was left, and so each buffer that one
    of them refers to. Frames that still run keep theirs, and so do functions within functions what
    they refer to; the lines of the traceback stay. See `without_frames`.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
    return error


def without_frames(error: BaseException, handled: BaseException | None = None) -> str:
    """Lets an error that may be kept for long go of every frame that it came through, and gives
    the lines of its traceback. What was `handled` already when it came (`sys.exception()` before)
    is no matter of it, and stays what it is for whoever handles it.
    """
    lines = "".join(traceback.format_exception(error))
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        if one.__context__ is handled:
            one.__context__ = None
    return lines


def _chain(error: BaseException, handled: BaseException | None = None) -> list[BaseException]:
    """It, and all that it came from, but for what was handled already."""
    left: list[BaseException | None] = [error]
    found: dict[int, BaseException] = {}
    while left:
        one = left.pop()
        if one is not None and one is not handled and id(one) not in found:
            found[id(one)] = one
            left += [one.__cause__, one.__context__]
    return list(found.values())
