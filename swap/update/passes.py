"""One step on its way through the pipeline: which of its subgroups are how far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from swap.plan.layout import Subgroup
from swap.update.stages import Job, Step


@dataclass(slots=True, eq=False)
class Pass:
    """One step on its way. ``ahead``: not started, through a slot; ``in_memory``: not started, and
    nothing to read; ``reading``: before the kernel; ``writing``: after it; ``held``: written, and
    waiting for the step to be validated. The first two are sorted by first use, and change under
    the pipeline's lock.
    """

    step: Step
    is_validated: bool
    is_complete: bool
    ahead: deque[Subgroup] = field(default_factory=deque)
    in_memory: deque[Subgroup] = field(default_factory=deque)
    is_rolled_back: bool = False
    was_speculative: bool = False
    reading: deque[Job] = field(default_factory=deque)
    writing: deque[Job] = field(default_factory=deque)
    held: deque[Job] = field(default_factory=deque)
    is_held_in_order: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.reading or self.writing or self.held)

    @property
    def waiting(self) -> list[Subgroup]:
        """What is not started."""
        return [*self.ahead, *self.in_memory]

    @property
    def first_waiting(self) -> list[Subgroup]:
        """The first of each kind."""
        return [*islice(self.ahead, 1), *islice(self.in_memory, 1)]
