"""What a manager removes, and when: what is not to be kept, and what killed saves left.

Invariants: what was saved last stays, and what is damaged or was found so by a load; a save that
fails takes no step with it that is to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aio.process.absence import is_directory
from checkpoint.directory.generations import generations, prune, remove_checkpoint
from checkpoint.directory.locate import read_manifest
from checkpoint.directory.lock import Lock
from checkpoint.directory.relocation import may_be_directory
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.known.manifests import UNSAID, KnownManifests, Listing
from checkpoint.known.verdicts import warned
from checkpoint.known.watched_loads import WatchedLoads
from checkpoint.series import Finished, changed, outdated, step_path, steps_in
from checkpoint.sheltered import Cancellation


class Retiring:
    """For the `Manager` of a root, on its first rank; `keep` and `keep_every` are as there.

    `is_being_saved` tells of saves of this process. A whole step goes before a save only where the
    manager `is_alone` and `at` what was saved last: who goes back to an older one, and fails to
    save, needs that again, and other ranks may know of damage that is not known here.
    """

    def __init__(
        self,
        root: Path,
        keep: int | None,
        keep_every: int | None,
        stripe_dirs: Sequence[Path],
        known: KnownManifests,
        loads: WatchedLoads,
        is_being_saved: Callable[[Path], bool],
        is_alone: bool,
    ) -> None:
        self._root, self._keep, self._keep_every = root, keep, keep_every
        self._stripe_dirs, self._known, self._loads = stripe_dirs, known, loads
        self._tried = set[int]()
        """Steps that this save tried to remove: what is in the way was told."""
        self._passed_over = set[int]()
        """Steps that this save could not read, or found damaged: that was told, and they stay."""
        self._sure_of = set[int]()
        """Steps of which the next save alone makes some old: the last one came through, and so did
        all removals behind it. Who was killed there, or failed, has left what was to go; so may
        have whoever saved steps that are not among these.
        """
        self._told = set[int | None]()
        """Of which this save has told what is in the way. None is the root."""
        self._is_clear = False
        """Nothing that killed saves left in steps that stay is there."""
        self._is_being_saved, self._is_alone = is_being_saved, is_alone
        self.at: int | None = None
        """The step that was loaded or saved last."""

    def begin(self) -> None:
        """What is in the way is to be told again."""
        self._tried.clear()
        self._passed_over.clear()
        self._told.clear()

    @contextmanager
    def telling(self, step: int | None = None) -> Iterator[None]:
        """`warned` of a step, or of the root; once a save."""
        with warned(self._root if step is None else step_path(self._root, step)):
            try:
                yield
            except (BlockingIOError, FileNotFoundError):
                raise
            except (OSError, CorruptCheckpointError):
                if step not in self._told:
                    self._told.add(step)
                    raise

    def make_room(self, step: int, cancellation: Cancellation) -> None:
        """Removes of other steps what killed saves left unfinished, or were about to remove: the
        next save, of this one, would have no room where there is some for one more than is kept.
        """
        self.begin()
        sure_of, self._sure_of = self._sure_of, set()
        was_clear, self._is_clear = self._is_clear, False
        with self.telling():
            steps = self._listed()
            is_sure = sure_of.issuperset(steps)
            known = self._known if is_sure else KnownManifests()
            for other in steps:
                cancellation.check()
                with self.telling(other):
                    if other != step and known.is_unfinished(step_path(self._root, other)):
                        self._tried.add(other)
                        self._remove(other, None)
            others = set(steps) - {step}
            self._is_clear = was_clear if is_sure else self._clear(others, cancellation)
            self._is_clear &= step not in steps  # what was there of it may fail to go
            if not is_sure and self._has_more():
                # What is there of it goes when the new one is durable.
                staying = {step} if self.at is None else {step, self.at}
                self._tried |= staying
                self._remove_old(cancellation)
                self._tried -= staying
                self._passed_over.discard(step)

    def retire(self, cancellation: Cancellation) -> None:
        """Removes what is not to be kept, and what killed saves left, behind `make_room`."""
        self._sure_of = set()
        steps = self._listed()  # what comes after this is new to the next save
        if self._remove_old(cancellation) and self._is_clear:
            self._sure_of = {*steps} & {*self._listed()}  # others may use a number that is gone

    def retire_apart(self, cancellation: Cancellation) -> None:
        """`retire` without a save of the manager."""
        self.begin()
        self._is_clear = self._clear(self._listed(), cancellation)
        self.retire(cancellation)

    def ordered(self) -> Listing:
        """Every step there is something of, those first that do not say when they were saved: they
        are damaged or unfinished. What was saved last comes next.
        """
        return self._known.ordered({step: step_path(self._root, step) for step in self._found()})

    def _listed(self) -> list[int]:
        """Whatever has the name of a step."""
        return steps_in(self._root) if is_directory(self._root) else []

    def _found(self) -> list[int]:
        """Every step there may be something of. What is no directory is no step."""
        return [step for step in self._listed() if may_be_directory(step_path(self._root, step))]

    def _has_more(self) -> bool:
        """Whether there may be more than is to be kept, by what manifests claim, and none of it is
        what the run goes on from.
        """
        every, ordered = self._keep_every, [] if self._keep is None else self.ordered()
        last = next((step for step, saved in ordered if saved != UNSAID), None)
        if last is None or last != self.at or not self._is_alone:
            return False
        return any(not every or step % every for step, _ in ordered[self._keep :])

    def _remove_old(self, cancellation: Cancellation) -> bool:
        """Whether all that is not to be kept is gone, and nothing stays of which that may be said
        another time: what could not be read for a moment, or is damaged, and may be whole again.
        """
        finished: list[Finished] = []
        paths = {step: step_path(self._root, step) for step in self._found()}
        self._loads.keep(paths.values())
        in_doubt = set(paths)
        for step in sorted(in_doubt - self._passed_over):
            cancellation.check()
            path = paths[step]
            with self.telling(step):
                if path.is_symlink():
                    in_doubt.discard(step)
                    continue
                if self._loads.was_damaged(path):
                    continue
                self._passed_over.add(step)
                try:
                    manifest, since = self._known.check(path), changed(path)
                except IncompleteCheckpointError:
                    if step not in self._tried:
                        self._remove(step, None)
                else:
                    finished.append(Finished(manifest.saved, step, manifest.uuid, since))
                self._passed_over.discard(step)
                in_doubt.discard(step)
        if self._keep is None:
            return True
        left = set[str]()
        for one in outdated(self._root, finished, self._keep, self._keep_every):
            cancellation.check()
            is_tried = one.uuid in left or one.step in self._tried
            if is_tried or not self._remove(one.step, one.uuid):
                left.add(one.uuid)  # where a copy stays, so does what it may be read from
                self._tried.add(one.step)
        return not left and not in_doubt

    def _clear(self, steps: Iterable[int], cancellation: Cancellation) -> bool:
        """Removes what killed saves over steps, that stay, left there. Whether it is gone."""
        in_the_way = set(steps)
        for step in sorted(in_the_way):
            cancellation.check()
            with self.telling(step):
                if self._clear_one(step_path(self._root, step)):
                    self._told.add(step)  # by whatever removed it
                else:
                    in_the_way.discard(step)
        return not in_the_way

    def _clear_one(self, path: Path) -> set[str]:
        """What cannot be removed."""
        if path.is_symlink() or not may_be_directory(path) or self._is_being_saved(path):
            return set()
        if len(generations(path)) > 1:
            with suppress(IncompleteCheckpointError), Lock(path):
                return prune(path, read_manifest(path).uuid, self._stripe_dirs)
        return set()

    def _remove(self, step: int, uuid: str | None) -> bool:
        """Whether it is gone. Nothing is done to what another thread saves, which has its lock."""
        path = step_path(self._root, step)
        self._known.forget(path)  # a removal that fails midway leaves what is unfinished
        with self.telling(step):
            if not self._is_being_saved(path) and remove_checkpoint(path, uuid, self._stripe_dirs):
                self._loads.forget(path)
                return True
        return False
