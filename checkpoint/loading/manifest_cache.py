"""Manifests that were found valid before: a second look at one is a look at its files.

A manager asks after every save which checkpoints are whole. Decoding manifests that have not
changed would take the interpreter from the training beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from checkpoint.directory.locate import check_data_file, peek_saved, peek_uuid, read_manifest
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.records import Manifest

_Stamp = tuple[int, int, int, int, int]
_damaged: dict[tuple[int, int], str] = {}
"""Saves that this process found damaged as it read their data, by whichever manager or none; the
last of them. By device and inode number of their manifests, which stay where permissions, owners,
times or links of those change; a file that takes their place later is of another save."""
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
        if stamp is not None and known is not None and known[0] == stamp:
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

    def note_damage(self, checkpoint: Path) -> None:
        """Of the save that was there when the load began: another rank found some, or it cannot be
        read, which is damage until all of it was read. What a look at the files finds as well (a
        disk is away) is found again for as long as it is so.
        """
        uuid = self._before.pop(checkpoint, None)
        with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
            if uuid is not None and self.check(checkpoint).uuid == uuid:
                _note(checkpoint, uuid)

    def damaged_of(self, steps: Iterable[int], path: Callable[[int], Path]) -> list[Path]:
        """Of steps that a load passed over, those of which it may have read something."""
        return [path(step) for step in steps if self.was_damaged(path(step))]

    def was_damaged(self, checkpoint: Path) -> bool:
        """Whether a load found damage in what is there still, or in what may be there still, where
        the manifest cannot be read.
        """
        uuid = _damaged_at(checkpoint)
        if uuid is None:
            return False
        try:
            return self._valid(checkpoint, _stamp(checkpoint)).uuid == uuid
        except (OSError, CorruptCheckpointError, IncompleteCheckpointError):
            return True

    def forget(self, checkpoint: Path) -> None:
        """The checkpoint is gone."""
        self._known.pop(checkpoint, None)
        self._before.pop(checkpoint, None)


def note_damage_of(checkpoint: Path, manifest: Manifest) -> None:
    """Data of the save that had this manifest as it was opened, with its files where they are, are
    damaged: another one may have taken its place since, and that is none of its damage.
    """
    if _damaged_at(checkpoint) == manifest.uuid:
        return
    with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
        if read_manifest(checkpoint).uuid == manifest.uuid:
            for file in manifest.files:
                check_data_file(manifest, checkpoint, file)
            _note(checkpoint, manifest.uuid)


class Read:
    """By which manifest a checkpoint is read, as it is found: the last one that was tried."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None

    def by(self, attempt: Callable[[Manifest], T]) -> Callable[[Manifest], T]:
        """What is to be done with a manifest, which is remembered."""

        def remembering(manifest: Manifest) -> T:
            self.manifest = _files_of(manifest)
            return attempt(manifest)

        return remembering


@contextmanager
def damage_noted(checkpoint: Path, *, reads_all: bool = False) -> Iterator[Read]:
    """Around what reads data of a checkpoint, or all of them. Damage, or that there is none, is
    that of the save whose manifest was read; damage of a manifest is found again by whoever looks.
    """
    read = Read()
    try:
        yield read
    except CorruptCheckpointError:
        if read.manifest is not None:
            note_damage_of(checkpoint, read.manifest)
        raise
    if reads_all and read.manifest is not None:
        _note_whole(checkpoint, read.manifest.uuid)


def _note(checkpoint: Path, uuid: str) -> None:
    place = _place(checkpoint)
    if place is None:
        return
    _damaged[place] = uuid
    while len(_damaged) > _MOST_DAMAGED:
        _damaged.pop(next(iter(_damaged)), None)


def _note_whole(checkpoint: Path, uuid: str) -> None:
    """All of a save was read, and is as it was saved."""
    place = _place(checkpoint)
    if place is not None and _damaged.get(place) == uuid:
        _damaged.pop(place, None)


def _damaged_at(checkpoint: Path) -> str | None:
    """The save that was found damaged when the file that is the manifest now was that of it."""
    place = _place(checkpoint)
    return None if place is None else _damaged.get(place)


def _place(checkpoint: Path) -> tuple[int, int] | None:
    """Device and inode number of the manifest; None if there is none."""
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
