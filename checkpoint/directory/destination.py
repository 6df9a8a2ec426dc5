"""Where the files of one save go."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aio.errors import check_path
from aio.process.absence import is_directory, is_name, is_there

PathLike = str | os.PathLike[str]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True, slots=True)
class Destination:
    """The checkpoint at `path`, the id of the save, and the directories that take its data.

    `stripes` are empty if the data go to the checkpoint's own directory. Data files have numbers;
    those of a rank go to the stripes in turn, or to those of them that are its `own`.
    """

    path: Path
    uuid: str
    stripes: tuple[Path, ...]
    own: tuple[int, ...] | None = None

    @property
    def num_stripes(self) -> int:
        return max(len(self.stripes), 1)

    @property
    def stripe_directories(self) -> list[Path]:
        """The directories that this save makes outside of the checkpoint's own."""
        return [stripe / f"{self.path.name}.{self.uuid}" for stripe in self.stripes]

    @property
    def data_directories(self) -> list[Path]:
        """The directories that this save makes for data files."""
        return self.stripe_directories or [self.path / self.uuid]

    def root_index(self, number: int) -> int | None:
        """Which stripe a data file is in; None for the checkpoint itself."""
        if not self.stripes:
            return None
        return number % len(self.stripes) if self.own is None else self.own[number % len(self.own)]

    def root(self, number: int) -> Path:
        """The directory that the path of a data file is relative to."""
        index = self.root_index(number)
        return self.path if index is None else self.stripes[index]

    def relative_path(self, rank: int, number: int) -> str:
        """Where a data file is, from its root."""
        folder = f"{self.path.name}.{self.uuid}" if self.stripes else self.uuid
        return f"{folder}/r{rank}-{number}.safetensors"


def new_uuid(path: Path) -> str:
    """The id of a save to a path. It has a letter: folders that are named after dates are none."""
    while (uuid := secrets.token_hex(4)).isdecimal() or is_there(path / uuid):
        continue
    return uuid


def checkpoint_path(path: PathLike, name: str = "path") -> Path:
    """The absolute path that a caller means, without links. Raises as `check_place`, and OSError
    for a loop of links.
    """
    check_place(path, name)
    return resolved(path)


def check_place(path: PathLike, name: str = "path") -> None:
    """Raises TypeError for what is no path, by its `name` among the arguments, ValueError for an
    empty one, for a text that no file can be called, and for a URL.
    """
    check_path(name, path)
    given = os.fspath(path)
    if not given:
        raise ValueError(f"{name} is empty; give '.' for the current directory")
    if not is_name(given):
        raise ValueError(
            f"{name}={given!r} is no path: no file has a zero byte, or half of a surrogate pair, "
            "in its name"
        )
    if _URL.match(given):
        raise ValueError(
            f"{name}={given!r} is a URL, and only file systems are written to and read; give a "
            f"path, or {'./' + given!r} for a directory of that name"
        )


def resolved(path: PathLike) -> Path:
    """The path without links. Raises OSError for a loop of them."""
    try:
        return Path(path).resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path)) from error


def stripe_paths(stripe_dirs: Iterable[PathLike] | None) -> tuple[Path, ...]:
    """Checks the directories that are to take the data. Raises TypeError, ValueError, OSError."""
    stripes = resolved_stripes(stripe_dirs)
    for stripe in stripes:
        if not is_directory(stripe):
            raise NotADirectoryError(errno.ENOTDIR, "a stripe directory must exist", str(stripe))
    places = {(status.st_dev, status.st_ino) for status in map(Path.stat, stripes)}
    if len(places) != len(stripes):
        raise ValueError(f"stripe_dirs are one directory by a mount: {[str(s) for s in stripes]}")
    return stripes


def resolved_stripes(stripe_dirs: Iterable[PathLike] | None) -> tuple[Path, ...]:
    """Stripe directories, which may be missing, wherever the process goes. Raises TypeError for a
    single path and for what is no list of them, ValueError for a directory that is named twice
    (and as `checkpoint_path` for each).
    """
    if stripe_dirs is None:
        return ()
    if isinstance(stripe_dirs, str | os.PathLike):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is one path; give a list of directories")
    if not isinstance(stripe_dirs, Iterable):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is not a list of directories")
    stripes = tuple(checkpoint_path(path, "stripe_dirs") for path in stripe_dirs)
    if len(set(stripes)) != len(stripes):
        raise ValueError(f"stripe_dirs names a directory twice: {[str(s) for s in stripes]}")
    return stripes
