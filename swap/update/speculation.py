"""Speculative updates: those of a step that is expected, begun while gradients still arrive.

A speculation is *idle* until a subgroup has all the gradients that the step before had for it. Then
a step is *expected*, and subgroups are updated for it on new extents as they become
complete. As the step is taken, what was done is *validated*, if it is what the step asks for; else
it is *rolled back*, as it is where other gradients arrive, or gradients are cleared. An error of
the speculative pass turns speculation *off*: steps then begin when they are taken.

Gradients may arrive on another thread; whoever takes or clears has waited for them. Whoever flushes
may do so beside all this, on a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from swap.plan.layout import Layout, Subgroup
from swap.storage.components import ComponentStore
from swap.update.pipeline import UpdatePipeline
from swap.update.readiness import Arrivals, is_as_expected
from swap.update.stages import Step

_log = logging.getLogger(__name__)


class Speculation:
    """The step that is expected, and what was fed to the pipeline for it. ``overlap=False``: never
    any.
    """

    def __init__(
        self, layout: Layout, components: ComponentStore, pipeline: UpdatePipeline, *, overlap: bool
    ) -> None:
        self._components = components
        self._pipeline = pipeline
        self._overlap = overlap
        self._arrivals = Arrivals(layout)
        self.expect_step: Callable[[], Step | None] | None = None
        """The step that is likely to be taken next, None (or a ``ValueError``) where that is not
        known. Without this speculation is off.
        """
        self._expected: Step | None = None
        self._fed: list[Subgroup] = []
        self._waiting: list[Subgroup] = []
        """Complete, while the step before is still under way."""
        self._turn = threading.RLock()
        """Held while these, and the pass that they tell of, go apart."""

    @property
    def backward_passes(self) -> int:
        """How many gradients the parameter with the most got for the last step."""
        return self._arrivals.most_expected

    # Gradients on their way.

    def is_surplus(self, parameter: int) -> bool:
        """Whether another gradient of ``parameter`` is one more than was speculated on: then this
        is to be rolled back, once all that are on their way have arrived.
        """
        return self._arrivals.is_surplus(parameter)

    def begin_adding(self, parameter: int) -> None:
        """A gradient of ``parameter`` is on its way. Nothing is validated until ``end_adding``: an
        error or an interrupt between the two leaves open what was speculated on.
        """
        self._arrivals.sent(parameter)

    def end_adding(self) -> None:
        """It is on its way, or has arrived."""
        self._arrivals.is_adding = False

    def arrived(self, parameter: int) -> None:
        """A gradient is stored: subgroups that it completes are updated for the expected step."""
        found = self._arrivals.arrived(parameter)
        expect_step = self.expect_step  # another thread may end all this meanwhile
        if expect_step is not None and self._overlap:
            with self._turn:
                self._feed(found, expect_step)

    def _feed(self, complete: Sequence[Subgroup], expect_step: Callable[[], Step | None]) -> None:
        self._waiting += [group for group in complete if self._can_be_speculative(group)]
        if not self._waiting:
            return
        if self._expected is None:
            # The step before may still be under way: then these wait for the next arrival.
            likely = self._likely_step(expect_step) if self._pipeline.is_idle else None
            if likely is None:
                return
            self._expected = likely
            self._pipeline.speculate(likely)
        self._pipeline.feed(self._waiting)
        self._fed += self._waiting
        self._waiting = []

    def _likely_step(self, expect_step: Callable[[], Step | None]) -> Step | None:
        """The step that is expected, of what is expected to have a gradient."""
        try:
            step = expect_step()
        except ValueError:  # of options that the program may be changing; the step itself asks anew
            return None
        return None if step is None else self._arrivals.of_expected(step)

    def stayed(self, parameter: int) -> None:
        """A gradient is stored on a device, where nothing is updated ahead: it is counted alone.
        Others may arrive meanwhile.
        """
        self._arrivals.arrived(parameter)

    def cleared(self) -> None:
        """Gradients were cleared without a step, and what was speculated on them rolled back."""
        self._arrivals.forget()

    # The step.

    def done_for(self, step: Step) -> list[Subgroup]:
        """What was fed and is as ``step`` asks for it. If nothing: roll back."""
        is_known = not self._arrivals.is_adding
        is_valid = is_known and is_as_expected(step, self._expected, self._fed)
        return self._fed if is_valid else []

    def taken(self) -> None:
        """The step is taken; its gradients are what the next one is expected to get."""
        self._arrivals.end_step()

    def validate(self, step: Step, done: list[Subgroup], moving: Sequence[Subgroup]) -> bool:
        """Make what is ``done`` the beginning of ``step``, which updates all that are ``moving``.
        False where nothing is, or another thread has rolled it back, or an error has stopped it:
        speculation is off then.
        """
        indices = {group.index for group in done}
        rest = [group for group in moving if group.index not in indices]
        if not done or self._pipeline.validate(step, done, rest):
            return bool(done)
        if self._pipeline.speculation_failure is None:
            return False
        self.expect_step = None
        _log.warning(
            "updates during the backward pass are off (they write new copies before the old ones "
            "are released, and that failed: %s); steps will take longer",
            self._pipeline.speculation_failure,
        )
        return False

    def end(self) -> None:
        """The step is under way: be idle."""
        self._expected, self._fed, self._waiting = None, [], []

    def roll_back(self) -> None:
        """Undo what was done for a step that will not be taken as expected."""
        with self._turn:
            self._waiting.clear()
            self._pipeline.roll_back()  # whatever is known of it: a handler may have come midway
            self._expected, self._fed = None, []

    def _can_be_speculative(self, group: Subgroup) -> bool:
        """Only what can be held back: arrays that have no spare block are updated in place."""
        can_wait = self._components.is_copied_on_write(group.index)
        return can_wait and self._arrivals.is_predictable
