"""Where the data of a checkpoint are now, whose stripe directories were moved since it was saved.

A manifest names the directories that took the data. They may be mounted elsewhere by now, or be
copies: what the reader gives is looked at first, what the manifest says after it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aio.process.absence import is_absent, is_directory, is_there
from checkpoint.directory.destination import PathLike, check_place, checkpoint_path
from checkpoint.format.records import FileRecord, Manifest

StripeDirs = (
    Sequence[PathLike]
    | Mapping[str, PathLike]  # of each by itself: to a type checker the keys of a dict are of one
    | Mapping[Path, PathLike]
    | Mapping[PathLike, PathLike]
)
"""Directories that are searched for the data of a save, by its id; or, by the directory that the
manifest names, the one that has its data now."""


@dataclass(frozen=True, slots=True)
class Relocation:
    """Stripe directories as a reader gives them."""

    searched: tuple[Path, ...] = ()
    moved: Mapping[str, Path] = field(default_factory=dict)

    def apply(self, manifest: Manifest) -> Manifest:
        """The manifest with its data files where they are now; files that are not found stay.

        Raises ValueError for a directory that `moved` names and the manifest does not.
        """
        if not self:
            return manifest
        moved = {
            old if old in manifest.roots else str(Path(old).resolve()): new
            for old, new in self.moved.items()
        }
        unknown = moved.keys() - set(manifest.roots)
        if unknown:
            raise ValueError(
                f"stripe_dirs moves {sorted(unknown)}, where this checkpoint has no data; "
                f"its data are in {list(manifest.roots) or 'its own directory'}"
            )
        roots = list(manifest.roots)
        files = []
        for file in manifest.files:
            place = None
            if file.root is not None and manifest.roots[file.root] in moved:
                directory = moved[manifest.roots[file.root]]
                # Where it is not there either, that is the place to name.
                place = directory, _find(directory, file.path, manifest.uuid) or file.path
            elif file.root is not None:
                place = self._search(file, manifest)
            if place is not None:
                root = str(place[0])
                if root not in roots:
                    roots.append(root)
                file = replace(file, root=roots.index(root), path=place[1])
            files.append(file)
        return replace(manifest, roots=tuple(roots), files=tuple(files))

    def _search(self, file: FileRecord, manifest: Manifest) -> tuple[Path, str] | None:
        """Where it was saved comes first if that is among the directories. One of them that cannot
        be looked at, which is for other users as a rule, has it where none else does, and that is
        the error then.
        """
        root = None if file.root is None else manifest.roots[file.root]
        refused = None
        for directory in sorted(self.searched, key=lambda directory: str(directory) != root):
            try:
                path = _find(directory, file.path, manifest.uuid)
            except OSError as error:
                refused = error.errno, error.strerror, error.filename
                continue
            if path is not None:
                return directory, path
        if refused is not None and root is not None and not is_there(Path(root) / file.path):
            raise OSError(*refused)
        return None

    def __bool__(self) -> bool:
        return bool(self.searched or self.moved)


AS_SAVED = Relocation()
"""Where the manifest says."""


def relocation(stripe_dirs: StripeDirs | None) -> Relocation:
    """Raises as `checkpoint_path`, TypeError for a single path, NotADirectoryError for a directory
    that is missing.
    """
    if stripe_dirs is None:
        return Relocation()
    if isinstance(stripe_dirs, str | os.PathLike):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is one path; give a list of directories")
    if not isinstance(stripe_dirs, Iterable):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is not a list of directories")
    if isinstance(stripe_dirs, Mapping):
        given = stripe_dirs.items()
        found = Relocation(
            moved={str(_absolute(old)): checkpoint_path(new, "stripe_dirs") for old, new in given}
        )
    else:
        found = searching(stripe_dirs)
    for directory in [*found.searched, *found.moved.values()]:
        if not may_be_directory(directory):
            raise NotADirectoryError(errno.ENOTDIR, "a stripe directory must exist", str(directory))
    return found


def may_be_directory(path: Path) -> bool:
    """Whether there is one, or that cannot be found out: it is an error for whoever needs it."""
    try:
        return is_directory(path)
    except OSError:
        return True


def searching(stripe_dirs: Sequence[PathLike] | None) -> Relocation:
    """Directories to search, of which some may be missing."""
    given = stripe_dirs or ()
    return Relocation(searched=tuple(checkpoint_path(path, "stripe_dirs") for path in given))


def _absolute(path: PathLike) -> Path:
    """As the manifest has it: where it was, whatever is there now."""
    check_place(path, "stripe_dirs")
    return Path(path).absolute()


def folders_of(directory: Path, uuid: str) -> list[Path]:
    """The folders of a save in a stripe directory, `<name>.<uuid>`; links are not among them.

    Raises OSError for a directory that is there and cannot be listed.
    """
    try:
        with os.scandir(directory) as found:
            entries = list(found)
    except OSError as error:
        if is_absent(error):
            return []
        raise
    return sorted(
        Path(entry.path)
        for entry in entries
        if entry.name.endswith(f".{uuid}") and entry.is_dir(follow_symlinks=False)
    )


def _find(directory: Path, path: str, uuid: str) -> str | None:
    """The path of a data file in a directory: where it was, or in a folder that was renamed.

    Raises OSError that names the file where that cannot be found out.
    """
    if is_there(directory / path):
        return path
    name = path.rpartition("/")[2]
    try:
        folders = folders_of(directory, uuid)
    except OSError as error:
        what = f"{error.strerror}: {directory} cannot be listed, and may have it in a folder that "
        raise OSError(error.errno, what + "was renamed", str(directory / path)) from error
    for folder in folders:
        if is_there(folder / name):
            return f"{folder.name}/{name}"
    return None
