"""Loads into one tree that begin anew: of a save that took the place of another, or of the step
before one that is damaged or gone.

With `strict=False` leaves stay as they are that the save lacks which is loaded in the end. They may
hold some of one that was begun before, and that is told.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.records import Manifest
from checkpoint.loading.into import names_lacking, values_lacking
from checkpoint.plan.selection import Selection


@dataclass(slots=True)
class _Begun:
    """A save of which reading has begun; `has_values`: the tree has its plain values, too, which
    come last. What ends behind that is ended by others: ranks go on together.
    """

    path: Path
    manifest: Manifest
    has_values: bool = False


@dataclass(slots=True)
class Attempts:
    """At loading into a tree. Manifests are kept: they may be gone, or not be readable, by then."""

    into: Any
    _begun: list[_Begun] = field(default_factory=list)
    """Of which some may be in it."""

    def begin(self, checkpoint: Path, manifest: Manifest) -> None:
        """Reading begins, of this save. Idempotent."""
        if not self._begun or self._begun[-1].manifest is not manifest:
            self._begun.append(_Begun(checkpoint, manifest))

    def end(self) -> None:
        """All of the last save was read, and plain values are about to be replaced."""
        self._begun[-1].has_values = True

    def check_same_place(self, path: Path, manifest: Manifest, selection: Selection) -> None:
        """Raises BlockingIOError for leaves that this save at a path lacks, which has been read,
        and another one had that was there before.
        """
        for checkpoint, names in self._mixed(manifest, selection):
            if checkpoint == path:
                raise BlockingIOError(
                    errno.EAGAIN,
                    f"was saved over while it was loaded, and {_listed(names)} of into may hold "
                    f"some of the save before, which alone has {_these(names)}; give "
                    f"{_them(names)} values, and load again",
                    str(path),
                )

    def check(self, damaged: Collection[Path], only: Any) -> None:
        """Of the last save that was begun, which has been read: raises CorruptCheckpointError for
        leaves that it lacks and one of those had that turned out to be damaged, BlockingIOError for
        those of one that was removed.
        """
        if not self._begun:
            return
        loaded, manifest = self._begun[-1].path, self._begun[-1].manifest
        for path, names in self._mixed(manifest, Selection(only, strict=False)):
            what = (
                f"{_listed(names)} of into may hold some of it: {loaded.name}, which was loaded in "
                f"its place, lacks {_these(names)}; give {_them(names)} values, and load"
            )
            if path in damaged:
                raise CorruptCheckpointError(
                    f"damaged, and {what} that step by its number", path=path
                )
            what = f"was removed while it was loaded, and {what} again"
            raise BlockingIOError(errno.EAGAIN, what, str(path))

    def _mixed(self, manifest: Manifest, selection: Selection) -> Iterator[tuple[Path, list[str]]]:
        before = [save for save in self._begun if save.manifest is not manifest]
        if not before:
            return
        given = self.into, selection
        data, values = names_lacking(manifest, *given), values_lacking(manifest, *given)
        for save in before:
            names = data - names_lacking(save.manifest, *given) if data else set()
            if values and save.has_values:
                names |= values - values_lacking(save.manifest, *given)
            if names:
                yield save.path, sorted(names)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3])


def _these(names: list[str]) -> str:
    return "these" if len(names) > 1 else "this"


def _them(names: list[str]) -> str:
    return "them" if len(names) > 1 else "it"
