"""Which subgroups can be updated before the step is taken: pure bookkeeping, no I/O.

A gradient is complete when it has arrived as often as in the step before; a subgroup is complete
when all its gradients are. That is a guess (the next backward pass may accumulate once more), so
what follows from it must be undone when it proves wrong. Speculating on the step follows
SuperOffload's speculation-then-validation; doing it on new extents, so that being wrong costs no
repair, is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from swap.plan.layout import Layout, Subgroup
from swap.plan.rules import ParameterUpdate
from swap.update.stages import Step


class Arrivals:
    """Counts gradients within a step and tells which subgroups they complete."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._expected: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._complete: set[int] = set()
        self.is_adding = False
        """Or was, when an error or an interrupt came: what was speculated on is not known then."""

    @property
    def is_predictable(self) -> bool:
        """Whether there was a step to learn from."""
        return bool(self._expected)

    @property
    def most_expected(self) -> int:
        """Gradients of the parameter that got most of them in the last step."""
        return max(self._expected.values(), default=0)

    def of_expected(self, step: Step) -> Step:
        """``step`` without updates of parameters that are expected to get no gradient."""
        updates = {index: update for index, update in step.updates.items() if self._expected[index]}
        return replace(step, updates=updates)

    def arrived(self, parameter: int) -> list[Subgroup]:
        """Count a gradient of ``parameter``; the subgroups that are complete now and were not."""
        self._arrived[parameter] += 1
        found = []
        for index in self._layout.subgroups_of(parameter):
            if index not in self._complete and self._is_complete(self._layout.subgroups[index]):
                self._complete.add(index)
                found.append(self._layout.subgroups[index])
        return found

    def sent(self, parameter: int) -> None:
        """A gradient of ``parameter`` is on its way; it arrives later. Who adds it resets
        ``is_adding`` at the end.
        """
        self.is_adding = True
        self._sent[parameter] += 1

    def is_surplus(self, parameter: int) -> bool:
        """Whether another gradient of ``parameter`` would be one more than expected, as far as is
        known.
        """
        is_more = self._sent[parameter] >= self._expected[parameter]
        return self.is_adding or (self.is_predictable and is_more)

    def end_step(self) -> None:
        """The counts of this step are what the next one is expected to repeat."""
        self._expected = self._arrived
        self.forget()

    def forget(self) -> None:
        """The gradients were cleared without a step."""
        self._sent = Counter()
        self._arrived = Counter()
        self._complete = set()

    def _is_complete(self, subgroup: Subgroup) -> bool:
        return all(
            self._arrived[segment.parameter] == self._expected[segment.parameter]
            for segment in subgroup.segments
        )


def is_as_expected(step: Step, expected: Step | None, fed: Sequence[Subgroup]) -> bool:
    """Whether a speculative pass did what ``step`` asks for in all subgroups it was ``fed``."""
    if expected is None or expected.gradient_scale != step.gradient_scale:
        return False
    parameters = {segment.parameter for group in fed for segment in group.segments}
    return all(
        _is_same(expected.updates.get(parameter), step.updates.get(parameter))
        for parameter in parameters
    )


def _is_same(one: ParameterUpdate | None, other: ParameterUpdate | None) -> bool:
    try:
        return one == other
    except Exception:  # of options, as arrays: what cannot be told may be another
        return False
