"""What is made to fail, and what has to hold after it.

Each attempt is one action with one failure in it. After it: the error is named, or there is none
and the action is done; values are those of before or after; what comes next works and has the bits
of an undisturbed run; descriptors, threads, memory and files are those that were there before.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from crashes.promises import Scenario
from sweep_saves import Footing
from torch.distributed.checkpoint.api import CheckpointException

import checkpoint
import infinity
from failures.interposed import Interposer, Kind, Outcome
from tests.support.interrupted_runs import Blocks, Run

_MAX_TRIES = 5
"""Of finishing what was stopped, on a disk that works again."""


class Attempts(Protocol):
    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        """One action whose operation `number` fails, and what did not hold."""


def unnamed(error: BaseException | None, kind: Kind, root: Path) -> list[str]:
    """What is wrong with an error: it is to be one of the disk, with its number and its place."""
    if error is None:
        return []
    if isinstance(error, CheckpointException):  # DCP's, of all ranks
        return unnamed(error.failures[0][0], kind, root)
    said = f"{type(error).__name__}: {error}"
    if kind.passes:
        return [f"{kind.name} means nothing, and gave {said}"]
    if isinstance(error, MemoryError) and kind.errno == errno.ENOMEM:
        return []
    if isinstance(error, checkpoint.CorruptCheckpointError) and kind.name == "zero":
        return [] if str(root) in said else [f"names no file: {said}"]
    if not isinstance(error, OSError):
        return [f"no error of the disk: {said}"]
    faults = []
    if kind.errno and error.errno != kind.errno:
        faults.append(f"errno {error.errno}, not {kind.errno}: {said}")
    if error.errno != errno.ENOMEM and str(root) not in said:
        faults.append(f"names no file: {said}")
    return faults


class SaveAttempts:
    """Saves of a scenario, over one another."""

    def __init__(self, scenario: Scenario, top: Path, interposer: Interposer) -> None:
        self._scenario, self._top, self._interposer = scenario, top, interposer
        self._number = 0
        for name in scenario.directories:
            (top / name).mkdir()
        for _ in range(3):
            self._save()
        self._footing = Footing.now()

    def _save(self) -> None:
        self._number += 1
        self._scenario.save(self._top, self._number)

    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        before = self._number
        outcome = self._interposer.attempt(self._save, kind, number)
        faults = unnamed(outcome.error, kind, self._top)
        try:
            found = self._scenario.found(self._top)
            if outcome.error is None and found != self._number:
                faults.append(f"{found} loads, and {self._number} was saved without an error")
            if found not in (before, self._number):
                faults.append(f"{found} loads, not {before} or {self._number}")
            self._save()
            if (found := self._scenario.found(self._top)) != self._number:
                faults.append(f"after the next save {found} loads, not {self._number}")
            faults += self._scenario.left_over(self._top, self._number)
        except Exception as error:
            faults.append(f"then {type(error).__name__}: {error}")
        return outcome.without_error(), faults + self._footing.lost()


class LoadAttempts:
    """Loads of what a scenario saved."""

    def __init__(self, scenario: Scenario, top: Path, interposer: Interposer) -> None:
        self._scenario, self._top, self._interposer = scenario, top, interposer
        for name in scenario.directories:
            (top / name).mkdir()
        scenario.save(top, 1)
        scenario.found(top)
        self._footing = Footing.now()

    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        found: list[int] = []

        def load() -> None:
            found.append(self._scenario.found(self._top))

        outcome = self._interposer.attempt(load, kind, number)
        faults = unnamed(outcome.error, kind, self._top)
        if found not in ([], [1]) or self._scenario.found(self._top) != 1:
            faults.append(f"{found} loads, not 1")
        return outcome.without_error(), faults + self._footing.lost()


class RunAttempts:
    """Actions of a run that is in its block."""

    def __init__(self, run: Run, action: str, interposer: Interposer) -> None:
        self._run, self._action, self._interposer = run, action, interposer

    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        self._run.before(self._action)
        outcome = self._interposer.attempt(self._act, kind, number)
        faults = unnamed(outcome.error, kind, self._run.folder)
        outcome = outcome.without_error()  # whose frames hold what they had taken
        try:
            for error in _finished(self._run):
                faults += unnamed(error, kind, self._run.folder)
            if wrong := self._run.undisturbed_after(self._action):
                faults.append(wrong)
        except Exception as error:
            faults.append(f"then {type(error).__name__}: {error}")
        return outcome, faults

    def _act(self) -> None:
        """A step is over when its updates are; they begin before it returns."""
        getattr(self._run, self._action)()
        if self._action == "step":
            self._run.flush()


def _finished(run: Run) -> Iterator[OSError]:
    """Finishes a step that was stopped; gives the errors that were kept for the next call."""
    for _ in range(_MAX_TRIES):
        try:
            run.offloaded.flush()
        except infinity.MixedStateError:  # refused by name until a load has worked
            return
        except OSError as error:
            yield error
        else:
            return
    raise RuntimeError("flush() does not finish the step on a disk that works")


class BlockAttempts:
    """Blocks that are entered or left."""

    def __init__(self, blocks: Blocks, action: str, interposer: Interposer) -> None:
        self._blocks, self._action, self._interposer = blocks, action, interposer

    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        outcomes: list[Outcome] = []
        faults: list[str] = []

        def attempt(action: Callable[[], object]) -> bool:
            outcome = self._interposer.attempt(action, kind, number)
            outcomes.append(outcome.without_error())
            faults.extend(unnamed(outcome.error, kind, self._blocks.nvme))
            if isinstance(outcome.error, infinity.RestoreError):
                outcome.error.retry()
            return outcome.error is None

        try:
            if wrong := self._blocks.failed(self._action, attempt):
                faults.append(wrong)
        except Exception as error:
            faults.append(f"then {type(error).__name__}: {error}")
        return outcomes[0], faults
