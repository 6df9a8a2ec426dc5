"""`Manager`: a series of checkpoints by step, the old ones removed, the damaged ones passed over.

Every checkpoint is `<root>/step-<step>`. Which is the latest is found by reading manifests; there
is no file that points to it and could point wrong.

Invariants over ranks: a step counts where every rank finds it whole, so all load the same one; rank
0 alone removes, after the commit.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aio import Engine
from checkpoint.commit_ranks import together
from checkpoint.coordinator import Coordinator, SingleProcess
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.guard import Guard
from checkpoint.known import KnownManifests
from checkpoint.leftovers import remove_checkpoint
from checkpoint.loading import load
from checkpoint.locate import is_finished
from checkpoint.memory import KeptMemory
from checkpoint.pending import PendingSave
from checkpoint.records import SaveInfo
from checkpoint.saving import PathLike, save, start_save

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class Manager:
    """Checkpoints of one run under `root`, made if missing.

    The newest `keep` are kept (None: all), and besides them every one whose step is a multiple of
    `keep_every`. Older ones are removed when a new one is durable. `stripe_dirs`, `engine` and
    `coordinator` are as in `save`. Not for several processes at once on one root, unless they are
    the ranks of a `coordinator`.

    With a `coordinator` every rank makes the same calls in the same order, but for `path`; each of
    them raises RankFailedError where another rank failed. `root` is where all ranks see it.
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
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} would remove what was just saved; give 1 or more")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every} is not a number of steps")
        self.root = Path(root).resolve()
        self._stripe_dirs = stripe_dirs
        self._keep = keep
        self._keep_every = keep_every
        self._engine = engine
        self._ranks: Coordinator = coordinator or SingleProcess()
        self._pending: PendingSave | None = None
        self._memory = KeptMemory()
        self._known = KnownManifests()

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        if step < 0 or type(step) is not int:
            raise ValueError(f"step={step!r} is not a number of steps")
        return self.root / f"step-{step}"

    def save(self, step: int, state: object) -> SaveInfo:
        """Saves the state of a step, then removes what is not to be kept. Raises as `save`."""
        path = self.path(step)
        self._settle()
        info = save(state, path, self._stripe_dirs, self._engine, coordinator=self._ranks)
        self.retire()
        return info

    def save_async(self, step: int, state: object, guard: Guard | None = None) -> PendingSave:
        """Saves in the background; see `checkpoint.save_async`.

        A save of this manager that is still running is waited for. What is not to be kept is
        removed when the new one is durable. Without a guard, the memory for the copy is kept for
        the next one, which is then made at the speed of memory, until the manager is gone.
        """
        path = self.path(step)
        self._settle()
        self._pending = start_save(
            state,
            path,
            self._stripe_dirs,
            guard,
            self._engine,
            after=self.retire,
            memory=self._memory,
            on_committed=partial(self._known.add, path),
            coordinator=self._ranks,
        )
        return self._pending

    def steps(self) -> list[int]:
        """Steps that can be loaded, ascending: their manifests are valid, their files are there.

        Others are passed over with a warning that says what is wrong with them.
        """
        with self._turn():
            return [step for step in self._candidates() if self._is_valid_everywhere(step)]

    def latest(self) -> int | None:
        """The newest step that can be loaded; None if there is none."""
        with self._turn():
            newest_first = reversed(self._candidates())
            return next((step for step in newest_first if self._is_valid_everywhere(step)), None)

    def load(self, step: int | None = None, **options: Any) -> Any:
        """Loads a step, or the newest one that is whole; `options` are those of `load`.

        Without a step, one whose data turn out to be damaged is passed over with a warning for the
        one before, by all ranks if any of them finds it so. Raises FileNotFoundError if there is
        none to load, and what `load` raises.
        """
        with self._turn():
            self._check_same(step)
            if step is not None:
                path = self.path(step)
                return self._together(lambda: load(path, **options))
            for candidate in reversed(self._candidates()):
                found: list[Any] = []
                if self._everywhere(candidate, partial(self._attempt, candidate, options, found)):
                    return found[0]
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint to load", str(self.root))

    def _attempt(self, step: int, options: dict[str, Any], found: list[Any]) -> bool:
        """Whether a step could be loaded; what it held is added to `found`."""
        try:
            found.append(load(self.path(step), **options))
        except (FileNotFoundError, IncompleteCheckpointError):
            return False
        except CorruptCheckpointError as error:
            _pass_over(self.path(step), error)
            return False
        return True

    # Agreeing with the other ranks.

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._ranks.begin()
        try:
            yield
        finally:
            self._ranks.end()

    def _together(self, step: Callable[[], T]) -> T:
        """What a step gave here; where it failed on one rank, all raise."""
        found: list[T] = []
        together(self._ranks, lambda: found.append(step()))
        return found[0]

    def _check_same(self, step: int | None) -> None:
        for rank, given in enumerate(steps := self._ranks.exchange(step)):
            if given != steps[0]:
                raise ValueError(f"rank 0 loads step {steps[0]}, rank {rank} step {given}")

    def _candidates(self) -> list[int]:
        """What rank 0 finds, on every rank."""
        return together(self._ranks, lambda: self._found() if self._ranks.rank == 0 else [])[0]

    def _is_valid_everywhere(self, step: int) -> bool:
        return self._everywhere(step, lambda: self._is_valid(step))

    def _everywhere(self, step: int, is_good: Callable[[], bool]) -> bool:
        """Whether a step is good on every rank."""
        answers = together(self._ranks, is_good)
        if any(answers) and not all(answers):
            lacking = [rank for rank, good in enumerate(answers) if not good]
            logger.warning("%s is passed over: not whole on ranks %s", self.path(step), lacking)
        return all(answers)

    # What this rank sees.

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.wait_done()
            self._pending = None

    def _found(self) -> list[int]:
        """Every step there is something of."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match is not None)

    def _whole(self) -> list[int]:
        return [step for step in self._found() if self._is_valid(step)]

    def _is_valid(self, step: int) -> bool:
        path = self.path(step)
        try:
            self._known.check(path)
        except (FileNotFoundError, IncompleteCheckpointError):
            # Removed since it was listed; or a save that runs or was killed, which is no damage.
            return False
        except CorruptCheckpointError as error:
            _pass_over(path, error)
            return False
        return True

    def retire(self) -> None:
        """Removes what is not to be kept, and what killed saves left.

        Saves of this manager do so themselves. It is for checkpoints that something else saves at
        `path(step)`, as `OffloadedModel.save` does; call it when none of these saves is running.
        Damaged checkpoints stay, for somebody to look at. Of several ranks the first one removes,
        and nobody waits for it.
        """
        if self._ranks.rank:
            return
        unfinished = [step for step in self._found() if not is_finished(self.path(step))]
        old = [] if self._keep is None else self._whole()[: -self._keep]
        dispensable = [step for step in old if not self._keep_every or step % self._keep_every]
        for step in sorted(unfinished + dispensable):
            try:
                remove_checkpoint(self.path(step))
                self._known.forget(self.path(step))
            except BlockingIOError:  # it is being saved
                continue
            except OSError as error:
                logger.warning("%s: cannot be removed: %s", self.path(step), error)


def _pass_over(path: Path, error: ValueError) -> None:
    logger.warning("%s is passed over: %s", path, error)
