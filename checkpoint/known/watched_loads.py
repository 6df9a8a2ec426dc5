"""Loads of a manager, of which the damage that they find is noted: such steps are not removed, and
do not count as kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.directory.locate import peek_uuid
from checkpoint.directory.relocation import relocation
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.known.damage import (
    damaged_saves,
    has_damaged_manifest,
    is_damaged,
    is_there,
    note,
)
from checkpoint.known.elsewhere import told_saves
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.verdicts import Verdict, failure_of, verdict_of
from checkpoint.ranks.turn import Turn

T = TypeVar("T")


class WatchedLoads:
    """Of checkpoints whose manifests are these."""

    def __init__(self, manifests: KnownManifests) -> None:
        self._manifests = manifests
        self._before: dict[Path, str | None] = {}
        """Of the last load of each: the save that was there as it began."""

    def judge(self, checkpoint: Path) -> Verdict:
        """What a look at its files finds, without loading any."""
        return verdict_of(checkpoint, lambda: self._manifests.check(checkpoint))

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
            moved = None
            if "stripe_dirs" in options:
                moved = relocation(options["stripe_dirs"])
            manifest = self._manifests.placed(checkpoint, moved)
            are_there = all(is_there(checkpoint, manifest, one) for one in manifest.files)
            if manifest.uuid == uuid and are_there:
                note(checkpoint, manifest)

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

    def was_damaged(self, checkpoint: Path) -> bool:
        """Whether a load, also that of another rank, found damage in what is there still, or in
        what may be there still, where the manifest cannot be read.
        """
        told = told_saves()
        if not told and not damaged_saves():
            return False
        try:
            manifest = self._manifests.placed(checkpoint)
        except (OSError, CorruptCheckpointError, IncompleteCheckpointError):
            return has_damaged_manifest(checkpoint)
        return manifest.uuid in told or is_damaged(checkpoint, manifest)

    def keep(self, checkpoints: Iterable[Path]) -> None:
        """All others are gone, by whomever they were removed."""
        there = set(checkpoints)
        self._manifests.keep(there)
        for path in list(self._before):
            if path not in there:
                self._before.pop(path, None)

    def forget(self, checkpoint: Path) -> None:
        """The checkpoint is gone."""
        self._manifests.forget(checkpoint)
        self._before.pop(checkpoint, None)
