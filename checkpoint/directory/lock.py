"""The lock on a checkpoint's directory, which a save holds from before it makes anything.

`flock` belongs to what was opened, not to who opened it: a process that is forked while it is held
(a worker of a DataLoader) holds it as well, for its life. So it is given back explicitly, which
counts for all who hold it, and a forked child closes what it did not open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from aio import naming, sync_directory
from aio.descriptors import Descriptor


class _Held:
    """The descriptors of the locks of this process, known before any child can be forked."""

    def __init__(self) -> None:
        self.forking = threading.Lock()
        """Held while descriptors come and go, and while a child is forked."""
        self._descriptors: set[weakref.ref[Descriptor]] = set()

    def open(self, descriptor: Descriptor, path: Path) -> None:
        """Opens the descriptor of a caller that will `close` it or let go of it."""
        with self.forking:
            self._descriptors = {one for one in self._descriptors if one() is not None}
            self._descriptors.add(weakref.ref(descriptor))
            descriptor.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self, descriptor: Descriptor) -> None:
        """Unlocks and closes, unless this is a child, which has closed it."""
        with self.forking:
            try:
                if descriptor.number >= 0:
                    fcntl.flock(descriptor.number, fcntl.LOCK_UN)
            finally:
                descriptor.close()

    def forget(self) -> None:
        """In a forked child: closes them and leaves the locks alone, which are the parent's."""
        self.forking.release()
        for one in self._descriptors:
            descriptor = one()
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    descriptor.close()
        self._descriptors = set()


_held = _Held()
os.register_at_fork(
    before=_held.forking.acquire,
    after_in_parent=_held.forking.release,
    after_in_child=_held.forget,
)


class Holder(Protocol):
    """A save that has a lock, and may be given up without a word to it."""

    def end_if_given_up(self) -> None: ...


_holders: WeakValueDictionary[Path, Holder] = WeakValueDictionary()


def hold(path: Path, holder: Holder) -> None:
    """Tells that `holder` has the lock of a checkpoint."""
    _holders[path] = holder


def end_given_up(path: Path) -> None:
    """Lets a save of this process go on that has the lock of a checkpoint, or end if it was given
    up. To be called on the thread that is about to save, which runs no other save then.
    """
    holder = _holders.get(path)
    if holder is not None:
        holder.end_if_given_up()


class Lock:
    """Keeps a second save to the same place away, of this process or another, inside a `with`. One
    that is let go of is open again, and runs no Python as it goes.

    The directory may be removed before the lock on it is had; with `make` it is made again then.
    Entering raises BlockingIOError if another one, which `by` calls what it is, has the lock, and
    FileNotFoundError without `make`.
    """

    def __init__(
        self, path: Path, *, make: bool = False, by: str = "save to this checkpoint"
    ) -> None:
        self._path, self._make, self._by = path, make, by
        self._descriptor = Descriptor()

    def __enter__(self) -> None:
        try:
            while not self._has_it():
                self._unlock()
        except BaseException:
            self._unlock()
            raise

    def __exit__(self, *_: object) -> None:
        self._unlock()

    def _unlock(self) -> None:
        with naming(self._path):
            _held.close(self._descriptor)

    def _has_it(self) -> bool:
        try:
            _held.open(self._descriptor, self._path)
        except FileNotFoundError:
            if not self._make:
                raise
            self._path.mkdir(exist_ok=True)
            sync_directory(self._path.parent)
            return False
        _lock(self._descriptor.number, self._path, self._by)
        return _is_at(self._descriptor.number, self._path)


def _lock(descriptor: int, path: Path, by: str) -> None:
    try:
        with naming(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        what = f"another {by} is still running"
        raise BlockingIOError(error.errno, what, str(path)) from error


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether what is locked is what is at `path` now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
