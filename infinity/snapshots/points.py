"""The snapshots of one run: taken, restored, dropped, and what they keep on the SSDs.

The order of a snapshot: the step is finished; its extents are pinned; swap files get their second
names, durably; what was written to them is durable; the rest is saved as a checkpoint, whose rename
makes the snapshot exist. Only then, durably too, older ones are removed, and what nothing else pins
is free. Behind training all from the second names on is done on the thread of the save, the second
names once host memory has been read, for which the next step waits.

Invariants: an extent that a published snapshot names is pinned, or in a file that this process
neither writes to nor gives back anything of. What an error leaves in doubt stays pinned until the
block ends. Whatever changes the table of snapshots runs where no signal handler does. One snapshot
at most is on its way behind training, and until it has ended the table is that thread's alone: a
call that needs it waits first. That thread never waits for a call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from checkpoint import PendingSave
from checkpoint.saving.api import SaveRequest, save_on, start_save
from checkpoint.sheltered import Cancellation, sheltered
from infinity.snapshots.adoption import adopt, alike, fill_host
from infinity.snapshots.entries import Entry, Snapshot, described, listed
from infinity.snapshots.known import Known
from infinity.snapshots.moment import Moment, keep_files, moment_of, pinned
from infinity.snapshots.pending import PendingSnapshot
from infinity.snapshots.reading import SavedPoint
from infinity.snapshots.saving import PointSave, save_behind, save_now
from infinity.values.loading import load_from
from infinity.values.persistence import TrainingState
from swap.interruptions.apart import run_apart
from swap.snapshots.folders import Folders
from swap.tiered import TieredState

_log = logging.getLogger(__name__)

_GRAIN_BYTES = 1 << 20
"""Of tensors in a snapshot: they are read from one end to the other."""


class Snapshots:
    """The snapshots on some nvme directories, for one block. Their folders are locked from the
    first call that needs it to ``close``.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        self._folders = Folders(directories)
        self._known = Known(self._folders)
        self._saves: list[PointSave] = []
        self._pending: PendingSnapshot | None = None
        """The last one that was taken behind training."""
        self._turn = threading.RLock()
        self._alone = threading.Lock()
        """Of threads that call at once."""
        self._is_over = False

    def take(self, training: TrainingState, name: str, keep: int | None, extra: Any) -> Snapshot:
        """Take one; the step must be finished, and no other thread at work on the state.

        Raises ``OSError`` (``AioError``) where it cannot be written, ``FileExistsError`` for a name
        that one of another model or version has, ``CorruptCheckpointError`` for that of a damaged
        one, ``BlockingIOError`` where another block has these folders, ``ChangedTensorError`` where
        another thread took a step. All snapshots are as before then; but where all is written, and
        what makes it durable fails, the new one may be there.
        """
        moment = moment_of(training, name, extra, copies=False)

        def work(cancellation: Cancellation) -> Snapshot:
            entry = self._pinned(moment)
            try:
                keep_files(self._folders, training.state, entry)
                cancellation.check()
                memory = training.checkpoint_bytes
                save_on(
                    SaveRequest(
                        state=moment.tree,
                        path=entry.folder,
                        staging_bytes=memory,
                        least_grain_nbytes=_GRAIN_BYTES,
                    )
                )
            except BaseException:
                self._known.take_back(training.state, entry)
                raise
            self._taken(moment, entry, keep)
            return described(entry.folder, entry.point)

        with self._turn, self._by_itself():
            self._wait_pending(name)
            self._let_end(name)
            return sheltered(work, "infinity-snapshot")

    def take_behind(
        self,
        training: TrainingState,
        name: str,
        keep: int | None,
        extra: Any,
    ) -> PendingSnapshot:
        """As ``take``, behind what comes: the next step of the optimizer, and all else that changes
        values, waits until host memory has been read. Raises what keeps it from beginning.
        """
        moment = moment_of(training, name, extra, copies=True)
        state = training.state

        def work(cancellation: Cancellation) -> PendingSnapshot:
            entry = self._pinned(moment)

            def ended(error: BaseException | None) -> None:
                if error is None:
                    self._taken(moment, entry, keep)
                else:
                    self._known.take_back(state, entry)

            try:
                cancellation.check()
                save = start_save(
                    SaveRequest(
                        state=moment.tree,
                        path=entry.folder,
                        guard=training.optimizer,
                        staging_bytes=training.checkpoint_bytes,
                        least_grain_nbytes=_GRAIN_BYTES,
                    ),
                    when_read=partial(keep_files, self._folders, state, entry),
                    on_end=ended,
                )
            except BaseException:
                self._known.take_back(state, entry)
                raise
            self._pending = PendingSnapshot(entry.point, save)
            training.saves.add(save)
            return self._pending

        with self._turn, self._by_itself():
            self._wait_pending(name)
            self._let_end(name)
            return sheltered(work, "infinity-snapshot")

    def _pinned(self, moment: Moment) -> Entry:
        points = self._known.look(moment.training.state, make=True)
        assert points is not None
        self._known.check_is_free(moment.name, moment.model)
        return pinned(moment, points, self._known.next_number)

    def _taken(self, moment: Moment, entry: Entry, keep: int | None) -> None:
        """``entry`` is durable."""
        self._known.put(moment.training.state, entry)
        self._drop_surplus(moment.training.state, moment.model, keep)

    def _wait_pending(self, name: str | None = None) -> None:
        """Wait for the snapshot that is taken behind training. Raises the error of one of that
        name, if nobody knows of it.
        """
        if self._pending is not None:
            self._pending.wait_done()
            if self._pending.name == name:
                self._pending.tell()

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

        def work(cancellation: Cancellation) -> PendingSave:
            """Begin one behind training: by then it is known, and kept from losing its files."""
            point = self._opened(training, name)
            try:
                cancellation.check()
                pending = save_behind(point, path, stripe_dirs, training.checkpoint_bytes)
            except BaseException:
                point.close()
                raise
            self._saves.append(PointSave(name, point, pending))
            training.saves.add(pending, is_of_now=False)
            return pending

        with self._turn, self._by_itself():
            self._wait_pending(name)
            self._let_end()
            if not block:
                return sheltered(work, "infinity-snapshot")
            with self._opened(training, name) as point:  # with other threads kept from dropping it
                return save_now(point, path, stripe_dirs, training.checkpoint_bytes)

    def _opened(self, training: TrainingState, name: str) -> SavedPoint:
        entry = self._known.found(training.state, name)
        return SavedPoint(entry, self._known.paths(entry))

    def _by_itself(self) -> threading.Lock:
        """What the call is within, which no other one of its thread is within: handlers of signals
        run in the middle of calls, and would wait for themselves.
        """
        if self._is_over:
            raise RuntimeError(
                "the block of the model ends, and its snapshots are nobody's any more: take them, "
                "and wait for threads that do, inside the `with` block"
            )
        if self._alone.locked():
            raise RuntimeError(
                "a call about snapshots of this thread is under way, and a handler of a signal (or "
                "a finalizer) that came in it cannot begin another one: set a flag there, and take "
                "the snapshot behind the next step"
            )
        return self._alone

    def _let_end(self, name: str | None = None) -> None:
        """Wait for the saves of one snapshot, or of all."""
        for save in [save for save in self._saves if name is None or save.name == name]:
            save.end()
            self._saves.remove(save)

    def listed(self) -> list[Snapshot]:
        """All there are, the oldest first; one that is on its way is not there yet."""
        return listed(self._folders.find())

    def drop(self, state: TieredState | None, name: str) -> None:
        """Remove one, durably; what only it keeps is free in ``state``, or given back by ``close``.
        Raises ``FileNotFoundError``, and ``BlockingIOError`` as ``take``.
        """

        def work(_: Cancellation) -> None:
            points = self._known.look(state, make=False)
            if points is None or name not in self._known:
                raise self._known.missing(name)
            self._known.remove(state, points / name)

        with self._turn, self._by_itself():
            self._wait_pending(name)
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
        ``offloaded.load`` does, ``FileNotFoundError``, and why it cannot be read, as it is.
        """
        state = training.state
        with self._turn, self._by_itself():
            self._wait_pending(name)
            entry = self._known.found(state, name)

            def adopted() -> set[int]:
                groups = alike(state, entry.contents)
                run_apart(partial(adopt, state, entry.contents, groups), "infinity-adopt")
                fill_host(state, entry.folder, groups, training.checkpoint_bytes)
                return {s.parameter for n in groups for s in state.layout.subgroups[n].segments}

            with SavedPoint(entry, self._known.paths(entry), adopted) as saved:
                return load_from(
                    training, entry.folder, saved.read, saved.check, begin=begin, then=then
                )

    def give_back_orphans(self) -> None:
        """Give back what processes that are gone left in files that snapshots keep; what cannot be
        is a warning, and where another block has the folders, it is that one's to do.
        """
        try:
            self._folders.remove_unfinished()
            self.warn_of_others()
            if self._folders.acquire(make=False, waits=False) is None:
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("cannot look for what snapshots do not need any more: %s", error)
            return
        self.close()

    def warn_of_others(self) -> None:
        """Say where there are snapshots that these directories do not give. Raises ``OSError``."""
        for folder in self._folders.others():
            _log.warning(
                "%s keeps what snapshots of a run with other nvme directories need, or with these "
                "in another order: neither listed nor given back here. Give those directories to "
                "use or drop them; if one is gone for good, remove the folder",
                folder,
            )

    def end(self) -> None:
        """The block ends: wait for the call that another thread is in; all later ones are refused.
        Idempotent.
        """
        with self._turn:
            self._is_over = True

    def close(self) -> None:
        """Give back what no snapshot needs, and let others have the folders. The files of the state
        must be closed. Idempotent; what cannot be given back is a warning.
        """
        with self._turn:
            self._close()

    def _close(self) -> None:
        self._wait_pending()
        self._let_end()
        if not self._folders.is_held:
            return
        is_empty = False
        try:
            is_empty = self._known.give_back()
        except OSError as error:
            _log.warning("cannot give back what snapshots do not need any more: %s", error)
        try:
            self._folders.release(is_empty=is_empty)
        except OSError as error:
            _log.warning("the folders of snapshots stay: %s", error)

    def _drop_surplus(self, state: TieredState, model: str, keep: int | None) -> None:
        """The new one is durable: what goes wrong with older ones is a warning."""
        ours = self._known.of_model(model)
        for save in [save for save in self._saves if save.pending.done()]:
            self._let_end(save.name)
        busy = {save.name for save in self._saves}
        for entry in ours[: -keep if keep else 0]:
            if entry.name in busy:
                continue  # the next one drops it
            try:
                self._known.remove(state, entry.folder)
            except OSError as error:
                _log.warning("cannot drop the snapshot %s: %s", entry.name, error)
