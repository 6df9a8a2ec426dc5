"""The lock on a checkpoint's directory, which a save holds from before it makes anything.

`flock` belongs to what was opened, not to who opened it: a process that is forked while it is held
(a worker of a DataLoader) holds it as well, for its life. So it is given back explicitly, which
counts for all who hold it, and a forked child closes what it did not open. Nobody waits for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from aio import naming
from aio.process.descriptors import Descriptor
from checkpoint.directory.files.making import deepest_first, make_directory, remove_empty

_MOST_OPENINGS = 20
"""Of a directory, while children are forked during each."""


class _Forks:
    """Tells whether a child may have been forked meanwhile, without keeping one from it: who waits
    for a fork, or has a fork wait, may do so in a handler of a signal, for a disk that hangs.

    The hooks are of C: no handler runs in one, whose exception would be lost there.
    """

    def __init__(self) -> None:
        self._under_way: list[None] = []
        self._watches: set[object] = set()
        begins = partial(self._under_way.append, None)
        os.register_at_fork(before=begins)
        # In this order: between the two calls a fork is under way still.
        clear = self._watches.clear
        os.register_at_fork(after_in_parent=clear, after_in_child=clear)
        os.register_at_fork(
            after_in_parent=self._under_way.pop, after_in_child=self._under_way.clear
        )

    def watch(self) -> object:
        """From now on, until it is let go of."""
        watch = object()
        self._watches.add(watch)
        return watch

    def may_have_come(self, watch: object) -> bool:
        """Since a watch began, which ends here. A fork that is under way is one that may."""
        none_came = watch in self._watches and not self._under_way
        self._watches.discard(watch)
        return not none_came


class _Held:
    """The descriptors of the locks of this process, which a forked child closes.

    Nothing here waits, and each change is one step: a handler of a signal may save or fork between
    any two.
    """

    def __init__(self) -> None:
        self._descriptors: set[weakref.ref[Descriptor]] = set()
        self._forks = _Forks()
        os.register_at_fork(after_in_child=self._forget)

    def open(self, descriptor: Descriptor, path: Path) -> None:
        """Opens the descriptor of a caller that will `close` it or let go of it.

        A child that was forked before its number was known has it, too. It is opened again then:
        what is locked is what no child has. A program that forks all the time is not waited for;
        should it be killed with the lock, that ends with the child.
        """
        for one in self._descriptors.copy():
            if one() is None:
                self._descriptors.discard(one)
        for _ in range(_MOST_OPENINGS):
            watch = self._forks.watch()
            self._descriptors.add(weakref.ref(descriptor))
            try:
                descriptor.open(path, os.O_RDONLY | os.O_DIRECTORY)
            finally:
                is_shared = self._forks.may_have_come(watch)
            if not is_shared:
                return
            descriptor.close()
        descriptor.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self, descriptor: Descriptor) -> None:
        """Unlocks and closes, unless this is a child, which has closed it."""
        try:
            if descriptor.number >= 0:
                fcntl.flock(descriptor.number, fcntl.LOCK_UN)
        except OSError:
            if descriptor.number >= 0:  # else a handler has forked this child at the last moment
                raise
        finally:
            descriptor.close()
            self._descriptors.discard(weakref.ref(descriptor))

    def _forget(self) -> None:
        """In a forked child: closes them and leaves the locks alone, which are the parent's."""
        while self._descriptors:
            descriptor = self._descriptors.pop()()
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    descriptor.close()


_held = _Held()


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

    With `make` the directory is made, and those above it, also where it is removed before the lock
    on it is had.
    Entering raises BlockingIOError if another one, which `by` calls what it is, has the lock, and
    FileNotFoundError without `make`.
    """

    def __init__(
        self, path: Path, *, make: bool = False, by: str = "save to this checkpoint"
    ) -> None:
        self._path, self._make, self._by = path, make, by
        self._descriptor = Descriptor()
        self._made: set[Path] = set()

    def remove_made(self) -> None:
        """Removes the directories that were made for this lock, and hold nothing: to be called
        while it is had. Who takes it next makes them again, and who comes without it would have
        the directory of the next holder go. In a forked child it does nothing.
        """
        made, self._made = self._made, set()
        if self._descriptor.number >= 0:
            remove_empty(deepest_first(made))

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
            self._made.update(make_directory(self._path))
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
