"""The order in which weights are used, recorded in one step and expected in the next: pure, no I/O.

A cycle runs from one optimizer step to the next, in inference from one pass to the next. The uses
of a cycle become the plan of later ones. A use that the plan does not expect moves the cursor to
where that parameter comes next; nothing fails, the prediction is just worse for a while. A plan is
replaced only when two cycles in a row departed from it, so that one evaluation in between does not
forget the training loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

NEVER = 1 << 60
"""Distance of a parameter that the plan does not know."""

LONGEST_CYCLE = 1 << 20
"""Uses of one cycle that are recorded; a longer one (an evaluation, say) does not become a plan."""


class Schedule:
    """Plan and cursor. Not thread-safe: its owner serialises."""

    def __init__(self) -> None:
        self._plan: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._cursor = 0
        self._recorded: list[int] = []
        self._last: int | None = None
        self._departed = False
        self._departures = 0
        self.expected_uses = 0
        self.unexpected_uses = 0

    @property
    def plan(self) -> tuple[int, ...]:
        return tuple(self._plan)

    @property
    def is_at_start(self) -> bool:
        """Whether a cycle begins now: everything that the plan expects of it is still to come."""
        return self._cursor == 0

    def record(self, parameter: int) -> None:
        """A use of ``parameter`` begins. Repeated uses without another between them count once."""
        if parameter == self._last:
            return
        self._last = parameter
        if len(self._recorded) < LONGEST_CYCLE:
            self._recorded.append(parameter)
        if not self._plan:
            return
        if self._plan[self._cursor] == parameter:
            self._cursor = (self._cursor + 1) % len(self._plan)
            self.expected_uses += 1
            return
        self.unexpected_uses += 1
        self._departed = True
        distance = self.distance(parameter)
        if distance < NEVER:
            self._cursor = (self._cursor + distance + 1) % len(self._plan)

    def end_cycle(self) -> None:
        """A step, or the end of a pass of inference: the recorded cycle may become the plan, and
        the cursor goes to its start.
        """
        departed = self._departed or len(self._recorded) != len(self._plan)
        self._departures = self._departures + 1 if departed else 0
        is_whole = 0 < len(self._recorded) < LONGEST_CYCLE
        self._cursor = 0  # before the plan changes: an interrupt leaves it within either
        if is_whole and (not self._plan or self._departures >= 2):
            self._adopt(self._recorded)
        self._recorded = []
        self._last = None
        self._departed = False

    def upcoming(self) -> Iterator[int]:
        """The uses that are expected next, nearest first, once around the plan."""
        for step in range(len(self._plan)):
            yield self._plan[(self._cursor + step) % len(self._plan)]

    def distance(self, parameter: int) -> int:
        """Uses before ``parameter`` is needed again (0: it is next); ``NEVER`` if it is not in the
        plan.
        """
        positions = self._positions.get(parameter)
        if positions is None:
            return NEVER
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            return positions[index] - self._cursor
        return positions[0] + len(self._plan) - self._cursor

    def first_use(self, parameter: int) -> int:
        """Position of the first use in a cycle; ``NEVER`` if it is not in the plan."""
        positions = self._positions.get(parameter)
        return positions[0] if positions else NEVER

    def _adopt(self, uses: list[int]) -> None:
        self._plan = uses
        self._positions = {}
        for position, parameter in enumerate(uses):
            self._positions.setdefault(parameter, []).append(position)
        self._departures = 0
