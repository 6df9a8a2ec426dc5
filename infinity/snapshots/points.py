"""The snapshots of one run: taken, restored, dropped, and what they keep on the SSDs.

The order of a snapshot: the step is finished; its extents are pinned; swap files get their second
names, durably; what was written to them is durable; the rest is saved as a checkpoint, whose rename
makes the snapshot exist. Only then, durably too, older ones are removed, and what nothing else pins
is free.

Invariants: an extent that a published snapshot names is pinned, or in a file that this process
writes nothing to. What an error leaves in doubt stays pinned until the block ends. Whatever changes
the table of snapshots runs where no signal handler does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import ChangedTensorError
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.ranks.coordinator import Arrival, SingleProcess
from checkpoint.saving.api import save_on
from checkpoint.sheltered import Cancellation, sheltered
from infinity.snapshots.adoption import adopt, alike, check_files, fill_host, pin_known
from infinity.snapshots.entries import (
    Entry,
    Point,
    Snapshot,
    described,
    listed,
    names_in,
    read_entry,
    read_point,
    remove_point,
)
from infinity.snapshots.reading import SavedPoint
from infinity.snapshots.saving import PointSave, save_behind, save_now
from infinity.snapshots.sources import contents_of, model_of, tree_of
from infinity.values.loading import load_from
from infinity.values.persistence import TrainingState
from swap.apart import run_apart
from swap.snapshots.contents import FileRange, encode
from swap.snapshots.folders import Folders
from swap.snapshots.sums import encode_sums
from swap.tiered import TieredState

_log = logging.getLogger(__name__)


class Snapshots:
    """The snapshots on some nvme directories, for one block. Their folders are locked from the
    first call that needs it to ``close``.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        self._folders = Folders(directories)
        self._entries: dict[str, Entry] = {}
        self._damaged: set[str] = set()
        self._in_doubt: list[Entry] = []
        self._saves: list[PointSave] = []
        self._is_known = False
        self._turn = threading.Lock()
        """Of threads that call at once."""

    def take(self, training: TrainingState, name: str, keep: int | None, extra: Any) -> Snapshot:
        """Take one; the step must be finished, and no other thread at work on the state.

        Raises ``OSError`` (``AioError``) where it cannot be written, ``FileExistsError`` for a name
        that another model's has, ``BlockingIOError`` where another block has these folders,
        ``ChangedTensorError`` where another thread took a step. All snapshots are as before then.
        """
        since = training.state.num_changes
        tree = tree_of(training, extra, since)
        model, step = model_of(training), max(training.steps, default=0)

        def work(cancellation: Cancellation) -> Snapshot:
            points = self._known(training.state, make=True)
            assert points is not None
            if name in self._damaged:
                with suppress(OSError, ValueError):
                    self._read_again(training.state, points, name)
            self._check_is_ours(name, model)
            number = 1 + max((e.point.number for e in self._entries.values()), default=0)
            published = training.state.components.pin_all()
            extents = [extent for extent in published.values() if extent is not None]
            contents = contents_of(training.state, published)
            point = Point(
                name=name,
                number=number,
                model=model,
                time_ns=time.time_ns(),
                step=step,
                kept_bytes=contents.nbytes,
            )
            entry = Entry(points / name, point, contents, extents)
            tree.update(point=point.to_tree(), contents=encode(contents))
            transfers = None if training.state.extents is None else training.state.extents.transfers
            if transfers is not None and transfers.verifies:
                known = (sums for extent in extents for sums in transfers.sums(extent))
                tree["sums"] = {"blocks": encode_sums(known)}
            self._publish(training, entry, tree, since, cancellation)
            self._drop_surplus(training.state, model, keep)
            return described(entry.folder, point)

        with self._turn:
            self._let_end(name)
            return sheltered(work, "infinity-snapshot")

    def save(
        self,
        training: TrainingState,
        name: str,
        path: str | os.PathLike[str],
        stripe_dirs: Sequence[str | os.PathLike[str]] | None,
        *,
        block: bool,
    ) -> Any:
        """Save one as ``offloaded.save`` would have when it was taken; without ``block`` behind
        what comes, and until it is done this one is neither replaced nor dropped. Raises as
        ``restore`` and ``checkpoint.save``.
        """
        with self._turn:
            entry = self._found(training.state, name)
            point = SavedPoint(entry, self._paths(entry))
            to = (point, path, stripe_dirs, training.checkpoint_bytes)
            try:
                if not block:
                    self._saves.append(PointSave(name, point, save_behind(*to)))
                    return self._saves[-1].pending
            except BaseException:
                point.close()
                raise
        with point:
            return save_now(*to)

    def _let_end(self, name: str | None = None) -> None:
        """Wait for the saves of one snapshot, or of all."""
        for save in [save for save in self._saves if name is None or save.name == name]:
            save.end()
            self._saves.remove(save)

    def listed(self) -> list[Snapshot]:
        """All there are, the oldest first."""
        return listed(self._folders.find())

    def drop(self, state: TieredState | None, name: str) -> None:
        """Remove one, durably; what only it keeps is free in ``state``, or given back by ``close``.
        Raises ``FileNotFoundError``, and ``BlockingIOError`` as ``take``.
        """

        def work(_: Cancellation) -> None:
            points = self._known(state, make=False)
            if points is None or not (name in self._entries or name in self._damaged):
                raise self._missing(name)
            self._remove(state, name, points / name)

        with self._turn:
            self._let_end(name)
            sheltered(work, "infinity-snapshot")

    def restore(
        self,
        training: TrainingState,
        name: str,
        begin: Callable[[], None],
        then: Callable[[], None],
    ) -> Any:
        """Let the state be as in the snapshot; returns its ``extra``. Raises what
        ``offloaded.load`` does, and ``FileNotFoundError``.
        """
        with self._turn:
            return self._restore(training, name, begin, then)

    def _restore(
        self,
        training: TrainingState,
        name: str,
        begin: Callable[[], None],
        then: Callable[[], None],
    ) -> Any:
        state = training.state
        entry = self._found(state, name)

        def adopted() -> set[int]:
            groups = alike(state, entry.contents)
            run_apart(partial(adopt, state, entry.contents, groups), "infinity-adopt")
            fill_host(state, entry.folder, groups, training.checkpoint_bytes)
            return {s.parameter for n in groups for s in state.layout.subgroups[n].segments}

        with SavedPoint(entry, self._paths(entry), adopted) as saved:
            return load_from(
                training, entry.folder, saved.read, saved.check, begin=begin, then=then
            )

    def _found(self, state: TieredState, name: str) -> Entry:
        """One that can be read, with all its files."""
        points = sheltered(lambda _: self._known(state, make=False), "infinity-snapshot")
        if points is not None and name in self._damaged:
            sheltered(lambda _: self._read_again(state, points, name), "infinity-snapshot")
        entry = self._entries.get(name)
        if entry is None:
            raise self._missing(name)
        check_files(self._folders, entry)
        return entry

    def give_back_orphans(self) -> None:
        """Give back what processes that are gone left in files that snapshots keep; what cannot be
        is a warning, and where another block has the folders, it is that one's to do.
        """
        try:
            self._folders.remove_unfinished()
            for folder in self._folders.others():
                _log.warning(
                    "%s keeps what snapshots of a run with other nvme directories need, or with "
                    "these in another order: neither listed nor given back here. Give those "
                    "directories to use or drop them; if one is gone for good, remove the folder",
                    folder,
                )
            if self._folders.acquire(make=False, waits=False) is None:
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("cannot look for what snapshots do not need any more: %s", error)
            return
        self.close()

    def close(self) -> None:
        """Give back what no snapshot needs, and let others have the folders. The files of the state
        must be closed. Idempotent; what cannot be given back is a warning.
        """
        self._let_end()
        if not self._folders.is_held:
            return
        points = self._folders.acquire(make=False)
        assert points is not None
        is_empty = False
        try:
            self._read_entries(points)
            is_empty = not (self._entries or self._damaged or names_in(points))
            if not self._damaged:
                self._folders.give_back(self._needed())
        except OSError as error:
            _log.warning("cannot give back what snapshots do not need any more: %s", error)
        self._entries, self._damaged, self._is_known = {}, set(), False
        try:
            self._folders.release(is_empty=is_empty)
        except OSError as error:
            _log.warning("the folders of snapshots stay: %s", error)

    def _known(self, state: TieredState | None, *, make: bool) -> Path | None:
        """The folder of snapshots, locked, with what is there known and pinned."""
        points = self._folders.acquire(make=make)
        if points is not None and not self._is_known:
            self._read_entries(points)
            if state is not None:
                pin_known(state, self._folders, self._entries.values())
            self._is_known = True
        return points

    def _read_entries(self, points: Path) -> None:
        self._entries, self._damaged = {}, set()
        for name in names_in(points):
            try:
                self._entries[name] = read_entry(points / name)
            except IncompleteCheckpointError:
                with suppress(OSError):
                    remove_point(points / name)  # what a killed process left of one
            except (OSError, ValueError) as error:
                _log.warning(
                    "the snapshot %s cannot be read, so nothing is given back of what it may "
                    "need; offloaded.drop_snapshot(%r) removes it: %s",
                    name,
                    name,
                    error,
                )
                self._damaged.add(name)

    def _read_again(self, state: TieredState, points: Path, name: str) -> None:
        """One that could not be read. Raises what is wrong with it, unless that has passed."""
        entry = read_entry(points / name)
        pin_known(state, self._folders, [entry])
        self._entries[name] = entry
        self._damaged.discard(name)

    def _publish(
        self,
        training: TrainingState,
        entry: Entry,
        tree: dict[str, Any],
        since: int,
        cancellation: Cancellation,
    ) -> None:
        """Make ``entry``, whose extents are pinned, exist; or unpin them, if it surely does not."""
        state, name = training.state, entry.point.name
        try:
            if since != state.num_changes or not state.pipeline.is_idle:
                raise ChangedTensorError(f"the state of snapshot {name}")
            if state.extents is not None:
                files = state.extents.own_files(entry.pinned)
                self._folders.keep(file.path for file in files)
                for file in files:
                    file.sync()
            cancellation.check()
            to = (tree, entry.folder, None, None, SingleProcess(), Arrival())
            save_on(*to, training.checkpoint_bytes)
        except BaseException:
            self._take_back(state, entry)
            raise
        before = self._entries.get(name)
        self._entries[name] = entry
        if before is not None:
            self._unpin(state, before)

    def _take_back(self, state: TieredState, entry: Entry) -> None:
        try:
            found: Point | None = read_point(entry.folder)
        except (FileNotFoundError, IncompleteCheckpointError):
            found = None
        except (OSError, ValueError):
            found = entry.point  # who knows
        if found == entry.point:
            self._in_doubt.append(entry)
        else:
            self._unpin(state, entry)

    def _check_is_ours(self, name: str, model: str) -> None:
        if name in self._damaged:
            raise CorruptCheckpointError(
                f"the snapshot {name} is there and cannot be read; "
                f"offloaded.drop_snapshot({name!r}) first"
            )
        if name in self._entries and self._entries[name].point.model != model:
            raise FileExistsError(
                f"the snapshot {name} is there and is another model's; give another name, or "
                f"offloaded.drop_snapshot({name!r}) first"
            )

    def _drop_surplus(self, state: TieredState, model: str, keep: int | None) -> None:
        """The new one is durable: what goes wrong with older ones is a warning."""
        ours = [e for e in self._entries.values() if e.point.model == model]
        ours.sort(key=lambda entry: entry.point.number)
        for save in [save for save in self._saves if save.pending.done()]:
            self._let_end(save.name)
        busy = {save.name for save in self._saves}
        for entry in ours[: -keep if keep else 0]:
            if entry.point.name in busy:
                continue  # the next one drops it
            try:
                self._remove(state, entry.point.name, entry.folder)
            except OSError as error:
                _log.warning("cannot drop the snapshot %s: %s", entry.point.name, error)

    def _remove(self, state: TieredState | None, name: str, folder: Path) -> None:
        remove_point(folder)
        entry = self._entries.pop(name, None)
        self._damaged.discard(name)
        if entry is not None:
            self._unpin(state, entry)

    def _unpin(self, state: TieredState | None, entry: Entry) -> None:
        if state is not None and state.extents is not None:
            pinned, entry.pinned = entry.pinned, []
            state.extents.unpin(pinned)

    def _needed(self) -> dict[str, list[FileRange]]:
        needed: dict[str, list[FileRange]] = {}
        for entry in self._entries.values():
            for parts in entry.contents.ranges.values():
                for part in parts:
                    needed.setdefault(part.file, []).append(part)
        return needed

    def _paths(self, entry: Entry) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for parts in entry.contents.ranges.values():
            for part in parts:
                if part.file not in paths:
                    place = self._folders.file(part.file)
                    assert place is not None
                    paths[part.file] = place[1]
        return paths

    def _missing(self, name: str) -> FileNotFoundError:
        names = ", ".join(self._entries) or "none"
        return FileNotFoundError(
            f"there is no snapshot {name} on these nvme directories (there are: {names}); give "
            "the directories that it was taken with, in the same order"
        )
