"""What lives said, held against the undisturbed run in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from soaking.programs import Task


@dataclass(slots=True)
class Counts:
    """What was done, of all programs together."""

    programs: int = 0
    lives: int = 0
    steps: int = 0
    faults: int = 0
    kills: int = 0
    resumes: int = 0
    comparisons: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, one.name)} {one.name}" for one in fields(self))


class Judge:
    """Hears what the lives of one program say, in their order."""

    def __init__(self, task: Task, expected: dict[str, Any], counts: Counts) -> None:
        self._num_steps, self._expected, self._counts = len(task.steps), expected, counts
        self._durable = 0
        self.is_complete = False
        """Whether a life has come to the end of the task."""

    def faults(self, said: Iterable[list[Any]]) -> list[str]:
        """What does not hold of what a life has said."""
        return [one for what in said if (one := self._heard(*what))]

    def _heard(self, what: str, *rest: Any) -> str:
        """What is wrong with something that a life has said."""
        return str(getattr(self, f"_heard_{what}")(*rest) or "")

    def _heard_wrong(self, what: str) -> str:
        return what

    def _heard_resumed(self, step: int, digest: str) -> str:
        self._counts.resumes += bool(step)
        if step < self._durable:
            return f"went on from step {step}, and {self._durable} was durable"
        self._durable = step
        return self._compared("weights", step, digest)

    def _heard_step(self, number: int, seen: list[str]) -> str:
        self._counts.steps += 1
        return self._compared("seen", number, seen)

    def _heard_looked(self, step: int, digest: str) -> str:
        return self._compared("weights", step, digest)

    def _heard_durable(self, step: int) -> None:
        self._durable = max(self._durable, step)

    def _heard_failed(self, count: int) -> None:
        self._counts.faults += count

    def _heard_lost(self) -> None:
        """Begins again with what is durable."""

    _heard_ended = _heard_lost

    def _heard_left(self, step: int, digest: str) -> str:
        if step != self._num_steps:
            return ""
        self.is_complete = True
        self._counts.comparisons += 1
        return "" if digest == self._expected["values"] else "values at the end are others"

    def _compared(self, what: str, number: int, found: Any) -> str:
        self._counts.comparisons += 1
        return "" if found == self._expected[what][number] else f"{what} of {number} are others"
