"""The folders that measured files are written to, and their removal, whatever happens.

Invariants: everything lies in one folder per directory that only this process has locked; it is
gone when the block ends. What a killed process left there is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aio import sync_directory
from checkpoint.bench.conditions.units import format_size

PREFIX = ".ckpt-bench-"
_WORK = "work"


class DiskSpaceError(RuntimeError):
    """A directory has not the room that a measurement takes, or would be left too full."""


@dataclass(frozen=True, slots=True)
class Place:
    """Empty folders to write into, one per directory, the first of which is the main one."""

    folders: tuple[Path, ...]

    @property
    def main(self) -> Path:
        return self.folders[0]


class Scratch:
    """Gives out places in `directories` (which exist) and empties them again.

    `keep_free_bytes`: what stays free on every file system; None for a twentieth of it.
    """

    def __init__(
        self, directories: Sequence[Path], homes: Sequence[Path], keep_free_bytes: int | None
    ) -> None:
        self.homes = dict(zip(directories, homes, strict=True))
        self._keep_free_bytes = keep_free_bytes

    @contextlib.contextmanager
    def place(self, directories: Sequence[Path], needed_bytes: int) -> Iterator[Place]:
        """Empty folders for `needed_bytes` in each of some directories, removed after the block.

        Raises DiskSpaceError if they would leave too little free.
        """
        check_space(directories, needed_bytes, self._keep_free_bytes)
        folders = tuple(self.homes[directory] / _WORK for directory in directories)
        try:
            for folder in folders:
                folder.mkdir()
            yield Place(folders)
        finally:
            for folder in folders:
                _remove(folder)
            for folder in folders:  # or the freeing of space would disturb what comes next
                sync_directory(folder.parent)


@contextlib.contextmanager
def open_scratch(
    directories: Sequence[Path], keep_free_bytes: int | None = None
) -> Iterator[Scratch]:
    """Makes the folders in which everything happens, and removes them with all that is in them.

    Raises OSError for a directory in which nothing can be made.
    """
    with contextlib.ExitStack() as stack:
        homes = []
        for directory in directories:
            remove_orphans(directory)
            homes.append(_make_home(directory, stack))
        yield Scratch(directories, homes, keep_free_bytes)


def _make_home(directory: Path, stack: contextlib.ExitStack) -> Path:
    """A folder that has its lock before it has the name by which others would remove it, and until
    it is gone.
    """
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    unlocked, home = directory / f".new{name}", directory / name
    stack.callback(_remove, home)
    stack.callback(_remove, unlocked)
    unlocked.mkdir()
    stack.enter_context(_locked(unlocked))
    stack.callback(_remove, home)
    return unlocked.rename(home)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def remove_orphans(directory: Path) -> list[Path]:
    """Removes what killed processes left in a directory, and says what that was."""
    removed = []
    for home in sorted(directory.glob(f"{PREFIX}*")):
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError, NotADirectoryError),
            _locked(home),
        ):
            shutil.rmtree(home)
            removed.append(home)
    return removed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock that ends with the process. Raises BlockingIOError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def check_space(
    directories: Sequence[Path], needed_bytes: int, keep_free_bytes: int | None
) -> None:
    """Raises DiskSpaceError if `needed_bytes` in each directory leave a file system too full.

    Directories on the same file system take from the same space.
    """
    by_device: dict[int, list[Path]] = {}
    for directory in directories:
        by_device.setdefault(directory.stat().st_dev, []).append(directory)
    for sharing in by_device.values():
        status = os.statvfs(sharing[0])
        free = status.f_bavail * status.f_frsize
        keep = status.f_blocks * status.f_frsize // 20
        keep = keep if keep_free_bytes is None else keep_free_bytes
        needed = needed_bytes * len(sharing)
        if needed + keep > free:
            names = ", ".join(map(str, sharing))
            raise DiskSpaceError(
                f"{names}: {format_size(free)} are free, the measurement takes "
                f"{format_size(needed)}, and {format_size(keep)} are to stay free; use a smaller "
                "--size, another --dir, or a smaller --keep-free"
            )
