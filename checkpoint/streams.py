"""`open_stream`: file objects at the speed of direct I/O, for `torch.save` and `torch.load`.

What is written appears under its name at once and durably when the stream is closed; until then,
and after an error, the file of that name is what it was. What is read is read ahead.

Engines are used where no signal handler runs, a block at a time: an interrupt is raised when they
are as they were or as they should be, and a read that it ended can be made again.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import warnings
import weakref
from collections import OrderedDict, deque
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt

from aio import AioError, Engine, Operation, read_regular_file
from checkpoint._native import ffi
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.files.replacing import Replacement
from checkpoint.format.checksum import copy_ranges
from checkpoint.sheltered import sheltered
from checkpoint.transfer.failed_writes import FailedWrite
from checkpoint.transfer.memory import staging_slab

_BLOCK_BYTES = 8 << 20
_NUM_BLOCKS = 8
_READ_AHEAD = 5
_SMALL_READ_BYTES = 64 << 10
_THREAD = "ckpt-stream"

_NOTHING = bool
"""In the place of a finalizer. That of `io` would call `close`: in Python, which swallows what
interrupts it. This one is called without an argument, and is C."""

Block = npt.NDArray[np.uint8]

_watches: dict[int, weakref.ref[_StreamWriter]] = {}
"""Of streams that are written and not closed, by their ids: each warns when its stream is let go
of. In a forked child none does: the stream is its parent's."""
os.register_at_fork(after_in_child=_watches.clear)


def open_stream(path: PathLike, mode: Literal["rb", "wb"] = "rb") -> BinaryIO:
    """A binary file object over `path`, a file.

    "wb": what is written is staged in 64 MiB of memory and goes to disk behind the caller.
    `close()` waits until it is durable and only then gives it its name; leaving a `with` block by
    an exception removes it instead. It cannot seek. A file of that name is replaced by one with its
    owner, as far as that may be, and its permissions. One that is let go of before it is closed
    leaves nothing, and a ResourceWarning. What a killed process leaves has a name of
    its own and goes with the next stream to `path`. "rb": a file to read and seek in, read ahead.
    Threads that share a stream have to take turns.

    Raises FileNotFoundError for a file or folder that is missing, OSError where a stream would
    replace a device, a pipe or a directory and for a file that does not say how long it is (those
    of /proc), ValueError for another mode and for a pipe or a terminal to read; its methods raise
    OSError naming the file.
    """
    if mode == "wb":
        return cast(BinaryIO, _StreamWriter(checkpoint_path(path)))
    if mode == "rb":
        raw = _StreamReader(checkpoint_path(path))
        return cast(BinaryIO, _BufferedReader(raw, _SMALL_READ_BYTES))
    raise ValueError(f'mode={mode!r} is neither "rb" nor "wb"')


class _StreamWriter(io.BufferedIOBase):
    """Collects what is written in blocks; a full one is written while the next one fills.

    One that nobody closed is no file: C removes what it holds, and `warnings` says so.
    """

    __del__: Any = _NOTHING

    def __init__(self, path: Path) -> None:
        self._held = ExitStack()
        super().__init__()
        self._path = path
        self._in_flight: deque[tuple[Operation, Block]] = deque()
        self._filled = 0
        self._offset = 0
        self._failed = False
        self._failure: FailedWrite | None = None
        try:
            sheltered(lambda _: self._create(), _THREAD)
            self._warn_if_dropped()
        except BaseException:
            self._failed = True
            self.close()
            raise

    def _warn_if_dropped(self) -> None:
        """As of `aio.File`: the reference to it calls `warnings` and nothing of ours."""
        what = f"the stream to {self._path} was never closed, and what was written to it is lost"
        warn = functools.partial(warnings.warn, what, ResourceWarning, 1)
        _watches[id(self)] = weakref.ref(self, warn)

    def _create(self) -> None:
        self._engine = self._held.enter_context(Engine())
        self._slab = staging_slab(_BLOCK_BYTES * _NUM_BLOCKS)
        self._free = [self._slab.allocate(_BLOCK_BYTES) for _ in range(_NUM_BLOCKS)]
        self._block = self._free.pop()
        self._replacement = Replacement(self._path)
        self._held.callback(self._replacement.discard)
        self._file = self._held.enter_context(self._engine.open(self._replacement.temporary, "w"))
        self._file.leave_open()  # C closes it, where this is let go of

    @property
    def name(self) -> str:
        return os.fspath(self._path)

    @property
    def mode(self) -> str:
        return "wb"

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._offset + self._filled

    def write(self, data: Any, /) -> int:
        """Takes all of `data`. Raises the error of any write before, too."""
        self._check_open()
        if self._failure is not None:  # also while that is handled: it may be tried again there
            raise self._failure.error(self.name)
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # no shape with a 0 can be cast
        done = 0
        failure = self._failure = FailedWrite()  # until all is taken, wherever an interrupt comes
        try:
            while done < len(view):
                done += self._take(view[done:])
            self._failure = None
        except BaseException as error:
            failure.come(error)
            raise
        return done

    def _take(self, view: memoryview) -> int:
        count = min(len(view), _BLOCK_BYTES - self._filled)
        if count:
            origin = int(ffi.cast("uintptr_t", ffi.from_buffer(view)))
            copy_ranges([origin], [self._block.ctypes.data + self._filled], [count])
            self._filled += count
        if self._filled == _BLOCK_BYTES:
            sheltered(lambda _: self._submit(), _THREAD)
        return count

    def _submit(self) -> None:
        data = self._block[: self._filled]
        operation = self._engine.write(self._file, self._offset, data)
        self._in_flight.append((operation, self._block))
        self._offset += self._filled
        self._filled = 0
        if not self._free:
            self._reap()
        self._block = self._free.pop()

    def _reap(self) -> None:
        operation, block = self._in_flight.popleft()
        self._free.append(block)
        operation.result()

    def flush(self) -> None:
        """Nothing is kept back that could be written; what makes it durable is `close`."""

    def close(self) -> None:
        """Makes what was written durable under its name. Raises OSError, and then removes it, also
        where a write has failed before, unless that error is on its way.

        An interrupt is raised when that is done.
        """
        if not self.closed:
            sheltered(lambda _: self._finish(), _THREAD)
            self._check_whole()

    def _finish(self) -> None:
        try:
            if not self._failed and self._failure is None:
                self._commit()
        finally:
            self._let_go()

    def _commit(self) -> None:
        if self._filled:
            self._submit()
        while self._in_flight:
            self._reap()
        self._replacement.give_attributes()
        self._file.sync()
        self._file.close()
        self._replacement.commit()

    def _let_go(self) -> None:
        _watches.pop(id(self), None)
        for operation, _ in self._in_flight:
            operation.abandon()
        self._in_flight.clear()
        try:
            self._held.close()
        finally:
            super().close()
            for name in ("_block", "_free", "_slab", "_file", "_replacement", "_engine"):
                vars(self).pop(name, None)  # here, where no interrupt meets what frees them

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failed, self._failure = True, None  # the error says enough
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"the stream to {self._path} is closed")

    def _check_whole(self) -> None:
        """Raises OSError where something that was written is lost and nobody is about to say so."""
        if self._failure is not None and not self._failure.is_handled():
            raise self._failure.error(self.name)


class _BufferedReader(io.BufferedReader):
    __del__: Any = _NOTHING


def _check_empty(path: Path) -> None:
    """Raises OSError for a file without a size that holds something, as those of /proc do."""
    if read_regular_file(path, 1):
        what = "its size is not known, as that of files in /proc; read it with open()"
        raise OSError(errno.EINVAL, what, str(path))


class _StreamReader(io.RawIOBase):
    """Reads blocks ahead of a reader that goes forward; keeps the last few."""

    __del__: Any = _NOTHING

    def __init__(self, path: Path) -> None:
        self._blocks: OrderedDict[int, tuple[Operation, Block]] = OrderedDict()
        self._held = ExitStack()
        super().__init__()
        self._path = path
        self._position = 0
        self._last = -1
        try:
            sheltered(lambda _: self._open(), _THREAD)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._engine = self._held.enter_context(Engine())
        self._file = self._held.enter_context(self._engine.open(self._path))
        self._file.leave_open()
        self._nbytes = self._file.size()
        if not self._nbytes:
            _check_empty(self._path)

    @property
    def name(self) -> str:
        return os.fspath(self._path)

    @property
    def mode(self) -> str:
        return "rb"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}
        if whence not in base:
            raise ValueError(f"whence={whence} is not 0, 1 or 2")
        if base[whence] + offset < 0:
            what = f"cannot seek to {base[whence] + offset}, before the beginning"
            raise OSError(errno.EINVAL, what, self.name)
        self._position = base[whence] + offset
        return self._position

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"the stream from {self._path} is closed")

    def readinto(self, buffer: Any, /) -> int:
        """Fills as much of the buffer as one block holds; 0 at the end."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        if self._position >= self._nbytes or not len(view):
            return 0
        number, inside = divmod(self._position, _BLOCK_BYTES)
        block = self._block(number)
        count = min(len(view), len(block) - inside)
        target = int(ffi.cast("uintptr_t", ffi.from_buffer(view)))
        copy_ranges([block.ctypes.data + inside], [target], [count])
        self._position += count
        return count

    def _block(self, number: int) -> Block:
        """A block, and those after it on their way if the reader goes forward."""
        goes_on = number in (self._last, self._last + 1)
        self._last = number
        end = min(number + (_READ_AHEAD if goes_on else 1), -(-self._nbytes // _BLOCK_BYTES))
        missing = [wanted for wanted in range(number, end) if wanted not in self._blocks]
        for wanted in range(number, end):
            if wanted in self._blocks:
                # Before others come: what is wanted now must not be the next to go.
                self._blocks.move_to_end(wanted)
        if missing and missing[0] <= number + 1:  # several at once: a thread takes its time
            sheltered(lambda _: self._fetch(missing), _THREAD)
        operation, block = self._blocks[number]
        try:
            operation.result()
        except AioError:
            del self._blocks[number]  # the next read of it tries again
            raise
        return block

    def _fetch(self, numbers: list[int]) -> None:
        for number in numbers:
            self._fetch_one(number)

    def _fetch_one(self, number: int) -> None:
        while len(self._blocks) >= _NUM_BLOCKS:
            _, (operation, _) = self._blocks.popitem(last=False)
            operation.abandon()  # if its bytes are asked for, they are read again
        offset = number * _BLOCK_BYTES
        with staging_slab(min(_BLOCK_BYTES, self._nbytes - offset)) as slab:
            block = slab.allocate(min(_BLOCK_BYTES, self._nbytes - offset))
        self._blocks[number] = (self._engine.read(self._file, offset, block), block)

    def close(self) -> None:
        """An interrupt is raised when that is done."""
        if not self.closed and "_held" in vars(self):
            sheltered(lambda _: self._finish(), _THREAD)

    def _finish(self) -> None:
        self._blocks.clear()
        try:
            self._held.close()
        finally:
            super().close()
            for name in ("_file", "_engine"):
                vars(self).pop(name, None)  # here, where no interrupt meets what frees them
