"""`Manager`: a series of checkpoints by step, the old ones removed, the damaged ones passed over.

Every checkpoint is `<root>/step-<step>`. Which is the latest is found by reading manifests, which
say when they were saved; there is no file that points to it and could point wrong.

A run that goes back to an earlier step and saves from there has its newest checkpoint at a lower
step than others have. The latest is the one that was saved last, and what is kept are those that
were saved last. So a save is never removed by its own retention, and the steps that were given up
are removed as they become old. Clocks do not matter: whatever saves at `<root>/step-<step>`, this
class or not, gives its manifest a later time than those beside it have, see `checkpoint.series`.

Invariants over ranks: a step counts where every rank finds it whole, so all load the same one; rank
0 alone removes, after the commit.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from aio import Engine
from checkpoint.directory.destination import PathLike, checkpoint_path, resolved_stripes
from checkpoint.directory.relocation import Relocation, may_be_directory
from checkpoint.format.records import SaveInfo
from checkpoint.known.manifests import UNSAID, KnownManifests, Listing
from checkpoint.known.retiring import Retiring
from checkpoint.known.verdicts import LoadedStep, Verdict, told, weakest
from checkpoint.known.watched_loads import WatchedLoads
from checkpoint.loading.api import check_unmixed, for_several, load
from checkpoint.outside import within
from checkpoint.ranks.coordinator import Arrival, Coordinator, Operation, accompanied, ranks_of
from checkpoint.ranks.turn import Turn, in_turn
from checkpoint.saving.api import SaveRequest, save_on, start_save
from checkpoint.saving.guard import Guard
from checkpoint.saving.pending import PendingSave, is_being_saved
from checkpoint.series import check_kept, step_path
from checkpoint.sheltered import sheltered
from checkpoint.transfer.memory import KeptMemory, check_engine

logger = logging.getLogger(__name__)

_MAX_LISTINGS = 100
"""Of a root in which another process saves and removes while this one looks."""


class Manager:
    """Checkpoints of one run under `root`, made if missing.

    The `keep` that were saved last are kept (None: all), and besides them every one whose step is a
    multiple of `keep_every`. Older ones are removed when a new one is durable. What killed saves
    left unfinished goes before the next save takes room; so do older steps that were left by who
    was killed, or failed, behind a save, where this manager has loaded or saved what was saved last
    (and has no other ranks). `stripe_dirs`, `engine` and `coordinator` are
    as in `save`; data of earlier saves that are not where they were saved are found in
    `stripe_dirs` too. One process at a time saves to a root, or the ranks of a `coordinator`;
    others may load from it meanwhile. A step that is a link to a directory is loaded and never
    removed, nor is a step that it leads to.

    With a `coordinator` every rank makes the same calls in the same order, this one too, but for
    `path`; each of them raises RankFailedError where another rank failed or was interrupted. `root`
    is where all ranks see it.
    """

    def __init__(
        self,
        root: PathLike,
        stripe_dirs: Sequence[PathLike] | None = None,
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        engine: Engine | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._ranks: Coordinator = ranks_of(coordinator)

        def check() -> tuple[Path, tuple[Path, ...]]:
            check_kept(keep, keep_every)
            check_engine(engine)
            return checkpoint_path(root, "root"), resolved_stripes(stripe_dirs)

        self.root, self._stripe_dirs = in_turn(
            self._ranks, Operation.MAKE, lambda made: made.apart(check)
        )
        self._engine = engine
        self._pending: Callable[[], PendingSave | None] = lambda: None
        self._memory = KeptMemory()
        self._known = KnownManifests(Relocation(self._stripe_dirs))
        self._loads = WatchedLoads(self._known)
        self._retiring = Retiring(
            self.root,
            keep,
            keep_every,
            self._stripe_dirs,
            self._known,
            self._loads,
            is_being_saved,
            self._ranks.world_size == 1,
        )
        self.loaded: LoadedStep | None = None
        """What the last `load` loaded; None before the first."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be. Raises ValueError for what is no step."""
        return step_path(self.root, step)

    def save(self, step: int, state: object) -> SaveInfo:
        """Saves the state of a step, then removes what is not to be kept.

        Raises as `save`, and instead of saving the error of this manager's last `save_async`, if
        nobody has been told of it.
        """

        def way(arrival: Arrival) -> SaveInfo:
            return save_on(self._request(step, state, arrival))

        info = accompanied(self._ranks, Operation.SAVE, way)
        self._retire_after_save(step)
        return info

    def save_async(self, step: int, state: object, guard: Guard | None = None) -> PendingSave:
        """Saves in the background; see `checkpoint.save_async`.

        A save of this manager that is still running is waited for, and its error raised here if
        nobody has asked for its result. What is not to be kept is removed when the new one is
        durable. Without a guard, the memory for the copy is kept for the next one, which is then
        made at the speed of memory, until the manager is gone.
        """

        def way(arrival: Arrival) -> PendingSave:
            pending = start_save(
                replace(self._request(step, state, arrival), guard=guard),
                after=partial(self._retire_after_save, step),
                memory=self._memory,
                on_committed=partial(self._known.add, self.path(step)),
            )
            self._pending = ref(pending)  # its error, once told, leads to whoever was told
            return pending

        return accompanied(self._ranks, Operation.SAVE, way)

    def _request(self, step: int, state: object, arrival: Arrival) -> SaveRequest:
        path, previous = self.path(step), self._wait_for_previous()
        if not self._ranks.rank:
            sheltered(partial(self._retiring.make_room, step), "checkpoint-retire")
        return SaveRequest(
            state=state,
            path=path,
            stripe_dirs=self._stripe_dirs,
            engine=self._engine,
            ranks=self._ranks,
            arrival=arrival,
            previous=previous,
        )

    def steps(self) -> list[int]:
        """Steps that can be loaded, ascending: their manifests are valid, their files are there.

        Others are passed over with a warning that says what is wrong with them, be it damage or
        that they cannot be read.
        """

        def look(looking: Turn) -> list[int]:
            verdicts = dict(self._judged(looking, self._judge, is_all=False))
            listing = self._candidates(looking, None, ends=True)
            return sorted(step for step, _ in listing if verdicts.get(step) is Verdict.WHOLE)

        return in_turn(self._ranks, Operation.STEPS, look)

    def latest(self) -> int | None:
        """The step that was saved last, of those that can be loaded; None if there is none."""

        def look(looking: Turn) -> int | None:
            judged = self._judged(looking, self._judge)
            return next((step for step, verdict in judged if verdict is Verdict.WHOLE), None)

        return in_turn(self._ranks, Operation.LATEST, look)

    def load(self, step: int | None = None, **options: Any) -> Any:
        """Loads a step, or of those that are whole the one that was saved last; `options` are those
        of `load`.

        Without a step, one that turns out to be damaged, or that cannot be read, is passed over
        with a warning for the one before, by all ranks if any of them finds it so. `loaded` says
        then which step it was and which were passed over, and so does the log. Raises
        FileNotFoundError, which says what was passed over, if there is none to load, and what
        `load` raises.
        """
        state = in_turn(self._ranks, Operation.LOAD, partial(self._find, step, options))
        self._retiring.at = None if self.loaded is None else self.loaded.step
        return state

    def _find(self, step: int | None, given: dict[str, Any], loading: Turn) -> Any:
        def asked() -> int | None:
            if step is not None:
                self.path(step)
            return step

        loading.same(asked, "loads step {}, rank {} step {}")
        options = for_several(given)
        if step is not None:
            path = self.path(step)
            look = partial(self._load, path, options)
            state = self._loads.load_apart(loading, path, look, options)
            self.loaded = told(self.root, step, ())
            return state
        found, passed_over = list[Any](), list[int]()
        attempt = partial(self._attempt, options, found, passed_over)
        for candidate, verdict in self._judged(loading, attempt):
            path = self.path(candidate)
            if verdict is Verdict.WHOLE:
                self.loaded = told(self.root, candidate, passed_over)
                return found[-1]
            found.clear()
            if verdict is Verdict.DAMAGED and candidate not in passed_over:
                self._loads.note_damage(path, options)
                passed_over.append(candidate)
        what = "there is no checkpoint to load"
        if passed_over:
            what += f"; damaged or unreadable: steps {', '.join(map(str, passed_over))}"
        raise FileNotFoundError(errno.ENOENT, what, str(self.root))

    def _attempt(
        self, options: dict[str, Any], found: list[Any], passed_over: list[int], step: int
    ) -> Verdict:
        """Loads a step, behind those that were passed over, and adds what it held to `found`."""
        path = self.path(step)
        verdict = self._loads.verdict(path, lambda: found.append(self._load(path, options)))
        if verdict is Verdict.WHOLE:
            check_unmixed(options, list(map(self.path, passed_over)))
        return verdict

    def _load(self, path: Path, options: dict[str, Any]) -> Any:
        there = [stripe for stripe in self._stripe_dirs if may_be_directory(stripe)]
        return within(load)(path, **{"stripe_dirs": there, **options})

    # Agreeing with the other ranks.

    def _judged(
        self, looking: Turn, judge: Callable[[int], Verdict], *, is_all: bool = True
    ) -> Iterator[tuple[int, Verdict]]:
        """Every step with what the ranks find of it, the one that was saved last first. `is_all`:
        nothing else is to be looked for, and nothing behind one that is whole.

        A listing is outdated when another process removes what is in it and saves anew. Where
        something is absent all is listed again, and judged from the beginning if that changed.
        """
        before: Listing | None = None
        judged, changes, absent = 0, 0, True
        while changes < _MAX_LISTINGS:
            is_over = before is not None and judged == len(before)
            listing = self._candidates(looking, before if is_all and is_over else None)
            if listing != before:
                before, judged, changes, absent = listing, 0, changes + 1, not listing
            elif is_over:
                return
            for step, saved in listing[judged:]:
                judged += 1
                is_last = is_all and judged == len(listing) and not absent
                placed = partial(self._in_place, step, saved, judge)
                verdict = self._everywhere(looking, step, placed, is_all, is_last)
                yield step, verdict
                if verdict is Verdict.ABSENT:
                    absent = True
                    break
            if judged == len(listing) and not absent:
                return

    def _in_place(self, step: int, saved: int, judge: Callable[[int], Verdict]) -> Verdict:
        """What is found of a step. One that did not say when it was saved is looked at, and nothing
        else: if it can be read by now, it could not be for a moment, and is absent where it was
        listed, and found in its place.
        """
        if saved != UNSAID:
            return judge(step)
        is_asked = not self._ranks.rank
        if is_asked and self._known.saved(self.path(step)) is not None:
            return Verdict.ABSENT
        verdict = self._judge(step)
        return Verdict.ABSENT if is_asked and verdict is Verdict.WHOLE else verdict

    def _candidates(self, looking: Turn, last: Listing | None, ends: bool = False) -> Listing:
        """What rank 0 finds, on every rank; what was saved last comes first. Nothing else is to be
        looked for where it is the `last` one again, or `ends` in any case.
        """
        listing = looking.together(self._ordered, lambda every: ends or every[0] == last)[0]
        self._loads.keep(self.path(step) for step, _ in listing)
        return listing

    def _everywhere(
        self,
        looking: Turn,
        step: int,
        judge: Callable[[], Verdict],
        ends_whole: bool,
        is_last: bool,
    ) -> Verdict:
        """What all ranks together find of a step."""

        def ends(answers: list[Verdict]) -> bool:
            verdict = weakest(answers)
            is_whole = verdict is Verdict.WHOLE
            return (ends_whole and is_whole) or (is_last and verdict is not Verdict.ABSENT)

        answers = looking.together(judge, ends)
        lacking = [rank for rank, answer in enumerate(answers) if answer != Verdict.WHOLE]
        if lacking and len(lacking) < len(answers):
            logger.warning("%s is passed over: not whole on ranks %s", self.path(step), lacking)
        return weakest(answers)

    # What this rank sees.

    def _wait_for_previous(self) -> PendingSave | None:
        """Waits for the last background save, whose error is the next one's to raise."""
        if (pending := self._pending()) is not None:  # a failed one is there until it is told
            pending.wait_done()
        return pending

    def _ordered(self) -> Listing:
        """Every step there is something of, for rank 0; see `KnownManifests.ordered`."""
        return [] if self._ranks.rank else self._retiring.ordered()

    def _judge(self, step: int) -> Verdict:
        return self._loads.judge(self.path(step))

    def retire(self) -> None:
        """Removes what is not to be kept, and what killed saves left.

        Saves of this manager do so themselves. It is for checkpoints that something else saves at
        `path(step)`, as `OffloadedModel.save` does; call it when none of these saves is running.
        A step that is newer than its manifest says (it was saved here last, and one from a host
        whose clock is ahead was copied in) stays with a warning until the next save.
        Damaged checkpoints stay, for somebody to look at; they do not count as kept, nor do those
        that anything of this process found so as it read them, or could not read, until all of them
        has been read, nor those of which another rank knew that when it saved last. What cannot be
        removed is a warning. Of several ranks the first one removes, and nobody waits for it.
        """
        if not self._ranks.rank:
            sheltered(self._retiring.retire_apart, "checkpoint-retire")

    def _retire_after_save(self, step: int) -> None:
        """The save itself is done, whatever becomes of old ones."""
        self._retiring.at = step
        with self._retiring.telling():
            if not self._ranks.rank:
                sheltered(self._retiring.retire, "checkpoint-retire")
