"""One step on its way through the pipeline: which of its subgroups are how far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from swap.interruptions.mixture import MixedStateError
from swap.plan.layout import Subgroup
from swap.update.stages import Job, RuleError, Stages, Step, VisitError


@dataclass(slots=True, eq=False)
class Pass:
    """One step on its way. ``ahead``: not started, through a slot; ``in_memory``: not started, and
    nothing to read; ``reading``: before the kernel; ``writing``: after it; ``held``: written, and
    waiting for the step to be validated. The first two are sorted by first use, behind what is
    ``begun`` (parameters, before the step is validated), and change under the pipeline's lock.
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
    begun: set[int] = field(default_factory=set)
    is_taken: bool = False
    """Whether the pipeline's thread has begun with it."""
    failure: BaseException | None = None
    """What stopped it."""
    left: list[Subgroup] = field(default_factory=list)
    """Abandoned, as it was stopped."""
    is_unknown: bool = False
    """Whether some of it may be half published: there was no memory, or a mistake of ours."""
    stopped_by: MixedStateError | None = None
    """What is raised for it, where it cannot be repeated."""

    @property
    def will_end(self) -> bool:
        """Whatever comes; one ahead of a step may be waiting for gradients, and for that step."""
        return self.is_validated or self.is_rolled_back

    @property
    def has_work(self) -> bool:
        """Whether there is something to do now; to undo, too."""
        is_under_way = bool(self.waiting or self.reading or self.writing)
        return is_under_way or self.is_rolled_back or (self.is_validated and bool(self.held))

    @property
    def waiting(self) -> list[Subgroup]:
        """What is not started."""
        return [*self.ahead, *self.in_memory]

    def add(
        self,
        subgroups: Iterable[Subgroup],
        first_use: Callable[[Subgroup], tuple[int, int]],
        needs_slot: Callable[[Subgroup], bool],
    ) -> None:
        """What the next forward pass wants first is updated first.

        The backward pass ends with the first layers, so of those that are complete the latest one
        comes next, once the parameter that is begun is finished: those that are begun after the
        step is taken go to the arena whole, and nothing of them is read again. What is left then
        lies behind, and has the forward pass up to there to be done in.
        """
        known = sorted([*self.waiting, *subgroups], key=first_use)
        known.sort(key=self.is_not_begun)
        moving = {group.index for group in known if needs_slot(group)}
        self.ahead = deque(group for group in known if group.index in moving)
        self.in_memory = deque(group for group in known if group.index not in moving)

    def order_held(self, first_use: Callable[[Subgroup], tuple[int, int]]) -> None:
        """What is held back by first use, once the step is taken: nothing is held any more then."""
        if not self.is_held_in_order:
            self.held = deque(sorted(self.held, key=lambda job: first_use(job.subgroup)))
            self.is_held_in_order = True

    def begin(self, group: Subgroup) -> None:
        """It goes on its way through a slot."""
        if not self.is_validated:
            self.begun.update(segment.parameter for segment in group.segments)

    @contextmanager
    def finishing(self, job: Job) -> Iterator[None]:
        """The end of ``job`` is waited for inside: one that turns out not to be updated is as
        before the kernel, and never to be published.
        """
        job.is_ahead = not self.is_validated
        try:
            yield
        except (RuleError, VisitError):
            self.writing.remove(job)
            self.reading.append(job)
            raise

    def bring_home(self, stages: Stages) -> list[Subgroup]:
        """Of a step that is stopped: publish what is written and abandon the rest, which is
        returned. May be called again where there was no memory.
        """
        for jobs in (self.held, self.writing):
            while jobs:
                try:
                    stages.publish(jobs[0])
                except Exception as failure:  # the first one is the one that is reported
                    self.is_unknown = self.is_unknown or isinstance(failure, MemoryError)
                    if not jobs[0].is_published:
                        self.reading.append(jobs[0])
                jobs.popleft()
        while self.reading:
            try:
                stages.abandon(self.reading[0])
            except MemoryError:
                raise
            except Exception:  # a mistake of ours, which would come up again
                self.is_unknown = True
            self.left.append(self.reading[0].subgroup)
            self.reading.popleft()
        return [*self.left, *self.waiting]

    def abandon(self, stages: Stages) -> None:
        """Leave everything as it is at home. May be called again where there was no memory."""
        self.reading += [*self.held, *self.writing]
        self.held.clear()
        self.writing.clear()
        self.bring_home(stages)

    def is_not_begun(self, group: Subgroup) -> bool:
        """Unless other parts of its parameters are on their way, for a step that is not taken."""
        return self.begun.isdisjoint(segment.parameter for segment in group.segments)

    @property
    def first_waiting(self) -> list[Subgroup]:
        """The first of each kind."""
        return [*islice(self.ahead, 1), *islice(self.in_memory, 1)]
