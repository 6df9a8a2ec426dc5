"""What has to hold of whatever the power leaves of a program that saves.

A program saves 1, 2, 3, ... and says before each that it is `begun` and behind each that it is
`reported`. Of any state of the disk then: what loads is the newest that was reported, or one that
was begun since; it is what was saved, bit for bit; there may be nothing only where nothing was
reported, and then the error says so. The next save works, and nothing is left over behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkpoint
from crashes.recording import say

KIB = 1 << 10
_BEGUN, _REPORTED = "begun", "reported"


def say_begun(number: int) -> None:
    say(f"{_BEGUN}/{number}")


def say_reported(number: int) -> None:
    say(f"{_REPORTED}/{number}")


@dataclass(frozen=True, slots=True)
class Promise:
    """The numbers of the last save that was begun and of the last that was reported; 0: none."""

    begun: int
    reported: int

    @classmethod
    def of(cls, said: Sequence[str]) -> Promise:
        found = {_BEGUN: 0, _REPORTED: 0}
        for word in said:
            what, _, number = word.partition("/")
            found[what] = max(found[what], int(number))
        return cls(found[_BEGUN], found[_REPORTED])

    def faults(self, found: int) -> list[str]:
        """What is wrong with finding the save of this number; 0 is none."""
        if self.reported <= found <= self.begun:
            return []
        return [f"{found} loads, {self.reported} was reported and {self.begun} begun"]


def state_of(number: int) -> dict[str, Any]:
    """What a save of this number saves: every element tells it."""
    large = torch.arange(3 * KIB) + (number << 32)
    small = [torch.full((50,), number, dtype=torch.int16) for _ in range(2)]
    return {"large": large, "small": small, "number": number, "name": f"save {number}"}


def number_of(state: Any) -> int:
    """The number of a state; raises ValueError for one that is not what was saved."""
    number = int(state["number"])
    wanted = state_of(number)
    same = [torch.equal(state["large"], wanted["large"]), state["name"] == wanted["name"]]
    same += [torch.equal(a, b) for a, b in zip(state["small"], wanted["small"], strict=True)]
    if not all(same):
        raise ValueError(f"what loads as {number} is not what was saved")
    return number


def checkpoint_at(path: Path) -> int:
    """The number of the checkpoint that loads; 0 if there is none, and the error names the place.
    Raises ValueError for another error, and what `load` raises.
    """
    try:
        return number_of(checkpoint.load(path))
    except (FileNotFoundError, checkpoint.IncompleteCheckpointError) as error:
        if str(path) not in str(error):
            raise ValueError(f"an error that names nothing: {error!r}") from error
        return 0


class Scenario:
    """A program and what has to hold for it. `directories` are there before it begins."""

    directories: tuple[str, ...] = ()
    count = 3

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, top: Path) -> None:
        """The program; in a process of its own, which is recorded."""
        for number in range(1, self.count + 1):
            say_begun(number)
            self.save(top, number)
            say_reported(number)

    def save(self, top: Path, number: int) -> None:
        raise NotImplementedError

    def found(self, top: Path) -> int:
        """The number of what loads."""
        raise NotImplementedError

    def left_over(self, top: Path, number: int) -> list[str]:
        """What is there beyond what save `number` made, which was the last."""
        raise NotImplementedError

    def lost(self, top: Path, promise: Promise) -> list[str]:
        """What was promised and is not below `top`."""
        return promise.faults(self.found(top))

    def faults(self, top: Path, promise: Promise) -> list[str]:
        """What does not hold of what is below `top` now. Saves once more, and puts nothing back."""
        try:
            faults = self.lost(top, promise)
            following = self.count + 1
            self.save(top, following)
            if (found := self.found(top)) != following:
                faults.append(f"after the next save {found} loads")
            return faults + self.left_over(top, following)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


def other_than(folder: Path, count: int) -> list[str]:
    """A fault if there are not so many entries in a folder."""
    entries = sorted(entry.name for entry in folder.iterdir())
    return [] if len(entries) == count else [f"{folder.name} holds {entries}"]
