"""Directories that are made for something, and go again where nothing comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aio import sync_directory
from aio.process.absence import is_there

_MOST_TRIES = 100
"""To make a directory while others remove those above it."""


def missing_directories(path: Path) -> list[Path]:
    """What would have to be made for a directory to exist, itself first."""
    return [parent for parent in [path, *path.parents] if not is_there(parent)]


def make_directory(path: Path) -> list[Path]:
    """Makes a directory and those above it, durably; gives those that were missing, itself first.
    Others may remove those that are empty meanwhile: they are made again. Raises OSError.
    """
    made: set[Path] = set()
    for remaining in reversed(range(_MOST_TRIES)):
        missing = missing_directories(path)
        made.update(missing)
        try:
            for directory in reversed(missing):
                directory.mkdir(exist_ok=True)
                sync_directory(directory.parent)
            break
        except FileNotFoundError:
            if not remaining:
                raise
        except BaseException:
            remove_empty(deepest_first(made))
            raise
    return deepest_first(made)


def deepest_first(directories: set[Path]) -> list[Path]:
    """Of directories that lie in one another, each before the one that it is in."""
    return sorted(directories, key=lambda one: len(one.parts), reverse=True)


@contextmanager
def made_directory(path: Path) -> Iterator[None]:
    """As `make_directory`; those that it made go again after an error, if nothing is in them: for
    what takes no lock on the directory, and makes it again where it is gone. An error that says
    that another process is about to use them leaves them to it.
    """
    made = make_directory(path)
    try:
        yield
    except BlockingIOError:
        raise
    except BaseException:
        remove_empty(made)
        raise


def remove_empty(directories: Sequence[Path]) -> None:
    """Of directories, each in the one behind it, those that hold nothing."""
    for directory in directories:
        try:
            directory.rmdir()
        except FileNotFoundError:  # it was never made
            continue
        except OSError:  # there is something in it
            break
