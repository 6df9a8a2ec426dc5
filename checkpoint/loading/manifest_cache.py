"""Manifests that were found valid before: a second look at one is a look at its files.

A manager asks after every save which checkpoints are whole. Decoding manifests that have not
changed would take the interpreter from the training beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.directory.locate import (
    check_data_file,
    is_in_doubt,
    peek_saved,
    peek_uuid,
    read_manifest,
)
from checkpoint.directory.relocation import AS_SAVED, Relocation, relocation
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.records import FileRecord, Manifest
from checkpoint.loading.verdicts import Verdict, failure_of, is_unreadable, verdict_of
from checkpoint.ranks.turn import Turn

_Stamp = tuple[int, int, int, int, int]
_Place = tuple[int, int]
"""Device and inode number."""


@dataclass(frozen=True, slots=True)
class _Damage:
    """Of the save of this id, whose manifest was the file at this place."""

    uuid: str
    manifest: _Place | None


_damaged: dict[_Place, _Damage] = {}
"""What this process found damaged or unreadable, by whichever manager or none; the last of it. By
the directories that the data files lie in: those stay where permissions, owners, times, links or
names change. A copy of a checkpoint, also one of hard links, and a copy of its stripes have others,
and may be sound; a directory that takes their place later is of another save. And by the files that
an error names: a hard link to one is as damaged."""
_MOST_DAMAGED = 10_000
T = TypeVar("T")


class KnownManifests:
    """Remembers, of every checkpoint, the manifest it last saw there and which file it was in."""

    def __init__(self, moved: Relocation = AS_SAVED) -> None:
        self._moved = moved
        self._known: dict[Path, tuple[_Stamp, Manifest]] = {}
        self._before: dict[Path, str | None] = {}

    def add(self, checkpoint: Path, manifest: Manifest) -> None:
        """This process has just written the manifest of a checkpoint."""
        stamp = _stamp(checkpoint)
        if stamp is not None:
            self._known[checkpoint] = stamp, _files_of(manifest)

    def check(self, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint that is whole, without its tensors and its tree.

        Raises what `read_manifest` and `check_data_file` do if it is not whole.
        """
        while True:
            stamp = _stamp(checkpoint)
            try:
                return self._checked(checkpoint, stamp)
            except CorruptCheckpointError:
                if _stamp(checkpoint) == stamp:
                    raise  # else it was removed or saved over meanwhile, and is no damage

    def _checked(self, checkpoint: Path, stamp: _Stamp | None) -> Manifest:
        manifest = self._valid(checkpoint, stamp)
        placed = self._moved.apply(manifest)
        for file in placed.files:
            check_data_file(placed, checkpoint, file)
        return manifest

    def _valid(self, checkpoint: Path, stamp: _Stamp | None) -> Manifest:
        known = self._known.get(checkpoint)
        is_known = stamp is not None and not is_in_doubt(stamp[:2])
        if is_known and known is not None and known[0] == stamp:
            return known[1]
        manifest = _files_of(read_manifest(checkpoint))
        if stamp is not None:
            self._known[checkpoint] = stamp, manifest
        return manifest

    def saved(self, checkpoint: Path) -> int | None:
        """When a checkpoint was saved, as the beginning of its manifest claims if it says anything;
        0 for a valid one that does not, None where there is no valid one.
        """
        known = self._known.get(checkpoint)
        if known is not None and known[0] == _stamp(checkpoint):
            return known[1].saved
        saved = peek_saved(checkpoint)
        if saved is None:
            with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
                return self.check(checkpoint).saved
        return saved

    def look_before(self, checkpoint: Path) -> None:
        """A load begins, of the save that is there now."""
        self._before[checkpoint] = peek_uuid(checkpoint)

    def verdict(self, checkpoint: Path, load: Callable[[], object]) -> Verdict:
        """`verdict_of` a load that begins now. What it finds itself is noted, of what it read."""
        self.look_before(checkpoint)
        verdict = verdict_of(checkpoint, load)
        if verdict is Verdict.DAMAGED:
            self._before.pop(checkpoint, None)
        return verdict

    def note_damage(self, checkpoint: Path, options: Mapping[str, Any]) -> None:
        """Of the save that was there when a load with these options began: another rank found some,
        or it cannot be read, which is damage until all of it was read. What a look at the files
        finds as well (a disk is away) is found again for as long as it is so. Of data that are
        somewhere else for this load it is there.
        """
        uuid = self._before.pop(checkpoint, None)
        if uuid is None:
            return
        with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
            moved = self._moved
            if "stripe_dirs" in options:
                moved = relocation(options["stripe_dirs"])
            manifest = moved.apply(self._valid(checkpoint, _stamp(checkpoint)))
            are_there = all(_is_there(checkpoint, manifest, one) for one in manifest.files)
            if manifest.uuid == uuid and are_there:
                _note(checkpoint, manifest)

    def load_apart(
        self, loading: Turn, checkpoint: Path, load: Callable[[], T], options: Mapping[str, Any]
    ) -> T:
        """`load`s what is at a path, with these options, each rank for itself, in the last meetings
        of a turn. Damage that another rank has read is known here as well, before it raises: one of
        them removes.

        Raises what `load` does, or RankFailedError.
        """
        found: list[T] = []
        failed: list[Exception] = []
        self.look_before(checkpoint)

        def attempt() -> bool:
            failed.extend(failure_of(checkpoint, lambda: found.append(load())))
            return bool(failed)

        def fail() -> None:
            if failed:
                raise failed.pop()  # it leads here: in a list it would keep what it came through

        if any(loading.together(attempt, lambda answers: not any(answers))):
            found.clear()
            if not failed:  # else it is noted, of what was read
                self.note_damage(checkpoint, options)
            loading.apart(fail)
        return found.pop()

    def damaged_of(self, steps: Iterable[int], path: Callable[[int], Path]) -> list[Path]:
        """Of steps that a load passed over, those of which it may have read something, wherever it
        had the data from.
        """
        known = {damage.uuid for damage in list(_damaged.values())}
        return [path(step) for step in steps if peek_uuid(path(step)) in known]

    def was_damaged(self, checkpoint: Path) -> bool:
        """Whether a load found damage in what is there still, or in what may be there still, where
        the manifest cannot be read.
        """
        if not _damaged:
            return False
        try:
            manifest = self._moved.apply(self._valid(checkpoint, _stamp(checkpoint)))
        except (OSError, CorruptCheckpointError, IncompleteCheckpointError):
            place = _place(checkpoint)
            return place is not None and any(
                damage.manifest == place for damage in list(_damaged.values())
            )
        places = _data_places(checkpoint, manifest, manifest.files)
        return any(_is_damaged(place, manifest) for place in places)

    def forget(self, checkpoint: Path) -> None:
        """The checkpoint is gone."""
        self._known.pop(checkpoint, None)
        self._before.pop(checkpoint, None)


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
    there = [one for one in named if _is_there(checkpoint, manifest, one)]
    if there:
        _note(checkpoint, manifest, there)
    if is_any and all(_is_there(checkpoint, manifest, one) for one in manifest.files):
        _note(checkpoint, manifest)


class Read:
    """By which manifest a checkpoint is read, as it is found: the last one that was tried."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.is_all = False
        """All of its data were compared with their checksums."""

    def by(self, attempt: Callable[[Manifest], T]) -> Callable[[Manifest], T]:
        """What is to be done with a manifest, which is remembered."""

        def remembering(manifest: Manifest) -> T:
            self.manifest = _files_of(manifest)
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


def _note(checkpoint: Path, manifest: Manifest, files: Iterable[FileRecord] | None = None) -> None:
    damage = _Damage(manifest.uuid, _place(checkpoint))
    for place in _data_places(checkpoint, manifest, files):
        _damaged[place] = damage
    while len(_damaged) > _MOST_DAMAGED:
        _damaged.pop(next(iter(_damaged)), None)


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


def _is_there(checkpoint: Path, manifest: Manifest, file: FileRecord) -> bool:
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
) -> set[_Place]:
    """Of the directories with the data files of a save, or of those with these and of these; those
    that are there.
    """
    paths = [manifest.file_path(checkpoint, one) for one in files or ()]
    paths = paths or [path for path, _ in _data_files(checkpoint, manifest)]
    directories = {path.parent for path in paths} or {checkpoint}
    places = set()
    for path in [*directories, *(paths if files is not None else ())]:
        with suppress(OSError):  # who reads it will say why
            status = path.stat()
            places.add((status.st_dev, status.st_ino))
    return places


def _place(checkpoint: Path) -> _Place | None:
    """Of the manifest; None if there is none."""
    stamp = _stamp(checkpoint)
    return None if stamp is None else stamp[:2]


def _files_of(manifest: Manifest) -> Manifest:
    """What is asked for again: the files. A million tensors need not be kept for it."""
    return replace(manifest, tensors=(), storages=(), tree=None)


def _stamp(checkpoint: Path) -> _Stamp | None:
    """Tells a manifest from one that is put in its place or written over, and from itself with
    other permissions; None if there is none.
    """
    try:
        status = (checkpoint / MANIFEST_NAME).stat()
    except OSError:  # reading it will say why
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
