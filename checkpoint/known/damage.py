"""Damage that this process has found, by whatever read: a manager or none, a load, `verify`, DCP.

A manager removes no step, and counts none as kept, of which that is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpoint.directory.locate import check_data_file, read_manifest
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.records import FileRecord, Manifest
from checkpoint.known.manifests import files_of, stamp_of
from checkpoint.known.verdicts import is_unreadable

_Place = tuple[int, int]
"""Device and inode number."""


@dataclass(frozen=True, slots=True)
class _Damage:
    """Of the save of this id, whose manifest was the file at this place, found at a path."""

    uuid: str
    manifest: _Place | None
    path: Path


_damaged: dict[_Place, _Damage] = {}
"""What this process found damaged or unreadable, by whichever manager or none; the last of it. By
the directories that the data files lie in: those stay where permissions, owners, times, links or
names change. A copy of a checkpoint, also one of hard links, and a copy of its stripes have others,
and may be sound; a directory that takes their place later is of another save. And by the files that
an error names: a hard link to one is as damaged."""
_MOST_DAMAGED = 10_000
T = TypeVar("T")


def note_error(
    checkpoint: Path, manifest: Manifest, error: CorruptCheckpointError | OSError
) -> None:
    """Of a read of data of the save that had this manifest as it was opened: they are damaged, or
    cannot be read, which may be a sector that is gone and is no better until all of them were.
    Other errors are none of theirs.
    """
    if isinstance(error, CorruptCheckpointError):
        note_damaged(checkpoint, manifest, {error.path})
    elif is_unreadable(checkpoint, error):
        note_damaged(checkpoint, manifest, {os.fsdecode(error.filename)})


def note_damaged(checkpoint: Path, manifest: Manifest, files: Set[str | None]) -> None:
    """These data files, and what lies beside each, are damaged; or, of what is none of them, any
    may be. Those of which a look says so are found again for as long as that is so. Another save
    may have come since, and that is none of its damage.
    """
    paths = {str(path): one for path, one in _data_files(checkpoint, manifest)}
    named = [paths[file] for file in files if file is not None and file in paths]
    is_any = len(named) < len(files)
    places = _data_places(checkpoint, manifest, None if is_any else named)
    if places and all(_is_damaged(place, manifest) for place in places):
        return
    if not _may_be_at(checkpoint, manifest.uuid):
        return
    there = [one for one in named if is_there(checkpoint, manifest, one)]
    if there:
        note(checkpoint, manifest, there)
    if is_any and all(is_there(checkpoint, manifest, one) for one in manifest.files):
        note(checkpoint, manifest)


class Read:
    """By which manifest a checkpoint is read, as it is found: the last one that was tried."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.is_all = False
        """All of its data were compared with their checksums."""

    def by(self, attempt: Callable[[Manifest], T]) -> Callable[[Manifest], T]:
        """What is to be done with a manifest, which is remembered."""

        def remembering(manifest: Manifest) -> T:
            self.manifest = files_of(manifest)
            return attempt(manifest)

        return remembering


@contextmanager
def damage_noted(checkpoint: Path) -> Iterator[Read]:
    """Around what reads data of a checkpoint, and says so if they were all of them; where no
    handler runs, or an interrupt could come before the note. Damage, or that there is none, is that
    of the save whose manifest was read; damage of a manifest is found again by whoever looks.
    """
    read = Read()
    try:
        yield read
    except (CorruptCheckpointError, OSError) as error:
        if read.manifest is not None:
            note_error(checkpoint, read.manifest, error)
        raise
    if read.is_all and read.manifest is not None:
        _note_whole(checkpoint, read.manifest)


def damaged_saves() -> set[str]:
    """The ids of those of which this process knows damage, wherever it was read."""
    return {damage.uuid for damage in list(_damaged.values())}


def damage_to_tell() -> list[str]:
    """`damaged_saves` for other processes, which know no places: without what has another directory
    or file in its place by now, from a backup as a rule, of which no damage is known.
    """
    found = [one.uuid for place, one in list(_damaged.items()) if _is_at(one.path, place)]
    return sorted(set(found))


def is_damaged(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether damage of this save was found where its data files are by this manifest."""
    places = _data_places(checkpoint, manifest, manifest.files)
    return any(_is_damaged(place, manifest) for place in places)


def has_damaged_manifest(checkpoint: Path) -> bool:
    """Whether damage was found by the manifest that is there, which need not be readable."""
    place = _place(checkpoint)
    return place is not None and any(damage.manifest == place for damage in list(_damaged.values()))


def note(checkpoint: Path, manifest: Manifest, files: Iterable[FileRecord] | None = None) -> None:
    """These data files of a save are damaged, or any of them may be."""
    place_of_manifest = _place(checkpoint)
    for place, path in _data_places(checkpoint, manifest, files).items():
        _damaged[place] = _Damage(manifest.uuid, place_of_manifest, path)
    for oldest in list(_damaged)[:-_MOST_DAMAGED]:  # a copy: other threads read, too
        _damaged.pop(oldest, None)


def _note_whole(checkpoint: Path, manifest: Manifest) -> None:
    """All of a save was read, where its files are, and is as it was saved."""
    for place in _data_places(checkpoint, manifest, manifest.files):
        if _is_damaged(place, manifest):
            _damaged.pop(place, None)


def _is_damaged(place: _Place, manifest: Manifest) -> bool:
    """Whether damage of this save was found there."""
    damage = _damaged.get(place)
    return damage is not None and damage.uuid == manifest.uuid


def _may_be_at(checkpoint: Path, uuid: str) -> bool:
    """Whether a save is at a path: also where that cannot be found out, as when its disk fails."""
    try:
        return read_manifest(checkpoint).uuid == uuid
    except (FileNotFoundError, IncompleteCheckpointError):
        return False
    except (OSError, CorruptCheckpointError):
        return True


def is_there(checkpoint: Path, manifest: Manifest, file: FileRecord) -> bool:
    """Whether a look at a data file finds nothing wrong with it."""
    try:
        check_data_file(manifest, checkpoint, file)
    except (OSError, CorruptCheckpointError):
        return False
    return True


def _data_files(checkpoint: Path, manifest: Manifest) -> list[tuple[Path, FileRecord]]:
    return [(manifest.file_path(checkpoint, file), file) for file in manifest.files]


def _data_places(
    checkpoint: Path, manifest: Manifest, files: Iterable[FileRecord] | None = None
) -> dict[_Place, Path]:
    """Of the directories with the data files of a save, or of those with these and of these; those
    that are there, each with its path.
    """
    paths = [manifest.file_path(checkpoint, one) for one in files or ()]
    paths = paths or [path for path, _ in _data_files(checkpoint, manifest)]
    directories = {path.parent for path in paths} or {checkpoint}
    places = {}
    for path in [*directories, *(paths if files is not None else ())]:
        with suppress(OSError):  # who reads it will say why
            status = path.stat()
            places[status.st_dev, status.st_ino] = path.absolute()
    return places


def _is_at(path: Path, place: _Place) -> bool:
    """Whether a path leads there still, or it cannot be told where to: what was there has another
    path, or is gone with all that is of its save.
    """
    try:
        status = path.stat()
    except OSError:
        return True
    return (status.st_dev, status.st_ino) == place


def _place(checkpoint: Path) -> _Place | None:
    """Of the manifest; None if there is none."""
    stamp = stamp_of(checkpoint)
    return None if stamp is None else stamp[:2]
