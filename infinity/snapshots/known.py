"""Which snapshots there are, what each needs, and what may go back of the files that they are in.

Space goes back by two ways: ranges of files of other processes, which a block has taken up, at
once (``swap.storage.extents``); and what is left when a block ends (``swap.snapshots.folders``).
Both are open only while every snapshot on the disk is read, and what it needs of such files is
pinned: one that cannot be read, for a moment or by this version, may need anything.

What cannot be read is looked at again whenever snapshots are used.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from aio.errors import let_go
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.sheltered import sheltered
from infinity.snapshots.adoption import check_files, pin_known
from infinity.snapshots.entries import (
    Entry,
    names_in,
    read_entry,
    read_point,
    read_twice,
    remove_point,
)
from swap.snapshots.contents import FileRange
from swap.snapshots.folders import Folders
from swap.tiered import TieredState

_log = logging.getLogger(__name__)


class Known:
    """The snapshots in ``folders``, for one block."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._entries: dict[str, Entry] = {}
        self._unread: dict[str, Exception | None] = {}
        """Those that could not be read, and why not; None where nobody has looked yet."""
        self._in_doubt: list[Entry] = []
        self._is_listed = False

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._unread

    def look(self, state: TieredState | None, *, make: bool) -> Path | None:
        """The folder of snapshots, locked, with what is there known and pinned. Raises as
        ``Folders.acquire``, and ``OSError`` where it cannot be told which there are.
        """
        points = self._folders.acquire(make=make)
        if points is not None:
            self._read_all(points)
            if state is not None:
                self._pin_all(state)
            self._let_adopted_go(state)
        return points

    def found(self, state: TieredState, name: str) -> Entry:
        """One that can be read, with all its files. Raises ``FileNotFoundError``, why it cannot be
        read, as it is, and ``AioError`` for a file that is missing or too short.
        """
        sheltered(lambda _: self.look(state, make=False), "infinity-snapshot")
        entry = self._entries.get(name)
        if entry is None:
            raise self._unread.get(name) or self.missing(name)
        check_files(self._folders, entry)
        if not entry.is_pinned:
            sheltered(lambda _: pin_known(state, self._folders, entry), "infinity-snapshot")
        return entry

    def missing(self, name: str) -> FileNotFoundError:
        names = ", ".join(sorted((*self._entries, *self._unread))) or "none"
        return FileNotFoundError(
            f"there is no snapshot {name} on these nvme directories (there are: {names}); give "
            "the directories that it was taken with, in the same order"
        )

    def check_is_free(self, name: str, model: str) -> None:
        """Raises as ``Snapshots.take`` unless ``model`` may have a snapshot of that name."""
        failure, remedy = self._unread.get(name), f"or offloaded.drop_snapshot({name!r}) first"
        if isinstance(failure, OSError):
            raise failure
        if isinstance(failure, CorruptCheckpointError):
            raise CorruptCheckpointError(
                f"the snapshot {name} is there and is damaged: {failure}; give another name, "
                f"{remedy}"
            ) from failure
        if failure is not None:
            raise FileExistsError(f"{failure}; give another name, {remedy}") from failure
        if name in self._entries and self._entries[name].point.model != model:
            raise FileExistsError(
                f"the snapshot {name} is there and is another model's; give another name, {remedy}"
            )

    @property
    def next_number(self) -> int:
        """Above those of all there are: also of those that cannot be read."""
        numbers = [entry.point.number for entry in self._entries.values()]
        return 1 + max([*numbers, time.time_ns() if self._unread else 0])

    def of_model(self, model: str) -> list[Entry]:
        """The oldest first."""
        ours = [entry for entry in self._entries.values() if entry.point.model == model]
        return sorted(ours, key=lambda entry: entry.point.number)

    def put(self, state: TieredState, entry: Entry) -> None:
        """``entry`` is there, durably, in the place of the one of its name."""
        before = self._entries.get(entry.name)
        self._entries[entry.name] = entry
        if before is not None:
            _unpin(state, before)

    def take_back(self, state: TieredState, entry: Entry) -> None:
        """After an error: ``entry`` is there, or is not, or nobody knows, and will look again. What
        was there before may come back after power loss, so that stays pinned, too.
        """
        failure: Exception | None = None
        try:
            is_there = read_twice(read_point, entry.folder) == entry.point
        except (FileNotFoundError, IncompleteCheckpointError):
            is_there = False
        except (OSError, ValueError) as error:
            is_there, failure = True, let_go(error)
        if not is_there:
            _unpin(state, entry)
            return
        before = self._entries.pop(entry.name, None)
        if before is not None:
            self._in_doubt.append(before)
        if failure is None:
            self._entries[entry.name] = entry
        else:
            self._in_doubt.append(entry)
            self._unread[entry.name] = failure

    def remove(self, state: TieredState | None, folder: Path) -> None:
        """Remove one, durably; what nothing else keeps is free. Raises ``OSError``."""
        remove_point(folder)
        entry = self._entries.pop(folder.name, None)
        self._unread.pop(folder.name, None)
        if entry is not None:
            _unpin(state, entry)
        self._let_adopted_go(state)

    def give_back(self) -> bool:
        """When the block ends, and nobody holds anything any more: give back what no snapshot needs
        of the files of processes that are gone, and know nothing. Gives whether no snapshot is
        left. Raises ``OSError``.
        """
        points = self._folders.acquire(make=False)
        assert points is not None
        self._is_listed = False
        try:
            self._read_all(points)
            if not self._unread:
                self._folders.give_back(self._needed())
            return not names_in(points)
        finally:
            self._entries, self._unread, self._is_listed = {}, {}, False

    def paths(self, entry: Entry) -> dict[str, Path]:
        """Of the swap files of one that was ``found``."""
        paths: dict[str, Path] = {}
        for parts in entry.contents.ranges.values():
            for part in parts:
                if part.file not in paths:
                    place = self._folders.file(part.file)
                    assert place is not None
                    paths[part.file] = place[1]
        return paths

    def _read_all(self, points: Path) -> None:
        if not self._is_listed:
            self._entries, self._unread = {}, dict.fromkeys(names_in(points))
            self._is_listed = True
        for name in [*self._unread]:
            self._read(points / name)

    def _read(self, folder: Path) -> None:
        try:
            self._entries[folder.name] = read_twice(read_entry, folder)
            del self._unread[folder.name]
        except IncompleteCheckpointError:  # what a killed process left of one
            try:
                remove_point(folder)
                del self._unread[folder.name]
            except OSError as error:  # who knows what comes back after power loss
                self._unread[folder.name] = let_go(error)
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and folder.name not in names_in(folder.parent):
                # It failed while nobody could look whether it was there, and never came to be:
                # nobody else removes any. Where the folder of all is gone, that was raised.
                del self._unread[folder.name]
                return
            if self._unread[folder.name] is None:
                _warn(folder.name, error)
            self._unread[folder.name] = let_go(error)

    def _pin_all(self, state: TieredState) -> None:
        for entry in self._entries.values():
            if not entry.is_pinned:
                try:
                    pin_known(state, self._folders, entry)
                except OSError as error:
                    _warn(entry.name, error)

    def _let_adopted_go(self, state: TieredState | None) -> None:
        if state is not None and state.extents is not None:
            entries = self._entries.values()
            are_known = not self._unread and all(entry.is_pinned for entry in entries)
            state.extents.let_adopted_go(are_known)

    def _needed(self) -> dict[str, list[FileRange]]:
        needed: dict[str, list[FileRange]] = {}
        for entry in self._entries.values():
            for parts in entry.contents.ranges.values():
                for part in parts:
                    needed.setdefault(part.file, []).append(part)
        return needed


def _unpin(state: TieredState | None, entry: Entry) -> None:
    if state is not None and state.extents is not None:
        pinned, entry.pinned = entry.pinned, []
        state.extents.unpin(pinned)


def _warn(name: str, error: Exception) -> None:
    """Only of one that is damaged it is said how to get rid of it."""
    is_damaged = isinstance(error, CorruptCheckpointError)
    remedy = f"; offloaded.drop_snapshot({name!r}) removes it" if is_damaged else ""
    _log.warning(
        "the snapshot %s cannot be read, so nothing is given back of what it may need%s: %s",
        name,
        remedy,
        error,
    )
