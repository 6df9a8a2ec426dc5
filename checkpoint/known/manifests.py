"""Manifests that were found valid before: a second look at one is a look at its files.

A manager asks after every save which checkpoints are whole. Decoding manifests that have not
changed would take the interpreter from the training beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from checkpoint.directory.locate import (
    check_data_file,
    is_finished,
    is_in_doubt,
    peek_saved,
    read_manifest,
)
from checkpoint.directory.relocation import AS_SAVED, Relocation, may_be_directory
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.records import Manifest
from checkpoint.series import warn_if_ahead

_Stamp = tuple[int, int, int, int, int]
Listing = list[list[int]]
"""Steps, each with when it says that it was saved."""
UNSAID = -1


class KnownManifests:
    """Remembers, of every checkpoint, the manifest it last saw there and which file it was in."""

    def __init__(self, moved: Relocation = AS_SAVED) -> None:
        self._moved = moved
        self._known: dict[Path, tuple[_Stamp, Manifest]] = {}

    def add(self, checkpoint: Path, manifest: Manifest) -> None:
        """This process has just written the manifest of a checkpoint."""
        stamp = stamp_of(checkpoint)
        if stamp is not None:
            self._known[checkpoint] = stamp, files_of(manifest)

    def check(self, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint that is whole, without its tensors and its tree.

        Raises what `read_manifest` and `check_data_file` do if it is not whole.
        """
        while True:
            stamp = stamp_of(checkpoint)
            try:
                return self._checked(checkpoint, stamp)
            except CorruptCheckpointError:
                if stamp_of(checkpoint) == stamp:
                    raise  # else it was removed or saved over meanwhile, and is no damage

    def _checked(self, checkpoint: Path, stamp: _Stamp | None) -> Manifest:
        manifest = self._valid(checkpoint, stamp)
        placed = self._moved.apply(manifest)
        for file in placed.files:
            check_data_file(placed, checkpoint, file)
        return manifest

    def placed(self, checkpoint: Path, moved: Relocation | None = None) -> Manifest:
        """The manifest that is there, without its tensors and its tree, with data files where they
        are now; or where they are by another relocation.

        Raises what `read_manifest` does.
        """
        found = self._moved if moved is None else moved
        return found.apply(self._valid(checkpoint, stamp_of(checkpoint)))

    def _valid(self, checkpoint: Path, stamp: _Stamp | None) -> Manifest:
        known = self._known.get(checkpoint)
        is_known = stamp is not None and not is_in_doubt(stamp[:2])
        if is_known and known is not None and known[0] == stamp:
            return known[1]
        manifest = files_of(read_manifest(checkpoint))
        if stamp is not None:
            self._known[checkpoint] = stamp, manifest
        return manifest

    def saved(self, checkpoint: Path) -> int | None:
        """When a checkpoint was saved, as the beginning of its manifest claims if it says anything;
        0 for a valid one that does not, None where there is no valid one.
        """
        known = self._known.get(checkpoint)
        if known is not None and known[0] == stamp_of(checkpoint):
            return known[1].saved
        saved = peek_saved(checkpoint)
        if saved is None:
            with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
                return self.check(checkpoint).saved
        return saved

    def is_unfinished(self, checkpoint: Path) -> bool:
        """Whether there is a directory, and no link, to which no save has finished. One whose
        manifest was valid before is not looked at: a killed save over it leaves that, and there may
        be many on a file system where each look takes its time. Raises OSError.
        """
        if checkpoint in self._known or not may_be_directory(checkpoint):
            return False
        return not checkpoint.is_symlink() and not is_finished(checkpoint)

    def ordered(self, steps: Mapping[int, Path]) -> Listing:
        """Steps at paths, those first that do not say when they were saved, and then the last."""
        found = []
        for step, path in steps.items():
            saved = self.saved(path)
            warn_if_ahead(path, saved or 0)
            found.append([step, UNSAID if saved is None else saved])
        return sorted(found, key=lambda one: (one[1] == UNSAID, one[1], one[0]), reverse=True)

    def keep(self, checkpoints: Set[Path]) -> None:
        """All others are gone."""
        for path in list(self._known):
            if path not in checkpoints:
                self.forget(path)

    def forget(self, checkpoint: Path) -> None:
        """The checkpoint is gone."""
        self._known.pop(checkpoint, None)


def files_of(manifest: Manifest) -> Manifest:
    """What is asked for again: the files. A million tensors need not be kept for it."""
    return replace(manifest, tensors=(), storages=(), tree=None)


def stamp_of(checkpoint: Path) -> _Stamp | None:
    """Tells a manifest from one that is put in its place or written over, and from itself with
    other permissions; None if there is none.
    """
    try:
        status = (checkpoint / MANIFEST_NAME).stat()
    except OSError:  # reading it will say why
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
