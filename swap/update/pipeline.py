"""The optimizer pipeline: read, kernel and write-back of different subgroups at once, behind
training.

One thread walks the subgroups of a *pass*. It starts reads for as many as there are staging slots,
runs the kernel on the oldest one that has arrived, and starts its write-back; the lanes of the
engine do the transfers meanwhile. Subgroups in host memory have none: they are for the times at
which nothing has arrived, so that neither disks nor processors stand still for one another. A
thread that waits for weights goes on as soon as the kernel is done with them.

A pass may be *speculative*: it begins during the backward pass, with the step that is expected. Its
subgroups are computed and written to new extents, or in spare blocks of memory, and held back. When
the step is taken as expected, the pass is validated: what is held is published and the rest
follows. Else it is rolled back; because nothing that was there before is overwritten, that loses
only the work.

A failure of I/O leaves every subgroup either before or after the step, and ``retry`` finishes what
was not done; any other is a ``MixedStateError`` from then on. Follows ZeRO-Infinity (arXiv
2104.07857, section 5.2.2) in overlapping the stages; copy-on-write, speculation on new extents and
retrying are ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from aio.errors import advise, is_no_room, let_go
from aio.process.threads import LOOK_SECONDS, Changes, Thread, join_thread, start_thread
from swap.cache.weight_cache import WeightCache
from swap.interruptions.mixture import MixedStateError
from swap.interruptions.undo import Undo
from swap.plan.layout import Subgroup, parts_of
from swap.processors import stay_in_background
from swap.update.passes import Pass
from swap.update.stages import Job, Stages, Step, VisitError

_REMEDY = "the step is not finished: mend that, then call offloaded.flush() to finish it"


class UpdatePipeline:
    """Runs passes on its own thread, in turn; with ``overlap=False`` one transfer at a time."""

    def __init__(
        self, stages: Stages, weights: WeightCache, undo: Undo, *, overlap: bool = True
    ) -> None:
        self._stages = stages
        self._weights = weights
        self._overlap = overlap
        self._lock = threading.RLock()
        self._changes = Changes()
        self._current: Pass | None = None
        self._is_closing = False
        self.speculation_failure: BaseException | None = None
        self._failure: BaseException | None = None
        self._left: tuple[Step, list[Subgroup]] | None = None
        self._mending = threading.RLock()  # by two threads at once the step would be done twice
        self._thread = Thread(self._run, "infinity-update", tells=True)
        undo.callback(self.close)  # also where making it is interrupted
        start_thread(self._thread)

    # Steps.

    def submit(self, step: Step, subgroups: Sequence[Subgroup]) -> None:
        """Start a step over ``subgroups``. The one before must have been waited for, or be this
        one: what stopped it is known until the thread has this.
        """
        work = Pass(step, is_validated=True, is_complete=True)
        try:
            self._weights.begin_update(parts_of(subgroups), step.updates, frozenset())
            self._add(work, subgroups)
            self._begin(work)
        except BaseException as interrupt:
            if not (self._current is work or work.is_taken):  # nor done by now: for ``retry``
                self._left = step, list(subgroups)
                self._failure = self._failure or let_go(interrupt)  # what there is to mend, still
                self._weights.fail(self._failure)
            raise

    def join(self) -> None:
        """Wait until the step is finished and at home, or was stopped; not for one to come."""
        self._outcome()

    def _outcome(self) -> BaseException | None:
        """Wait as ``join`` does. Gives what stopped the step: of the moment at which none is under
        way, for another thread may be about to begin it again.
        """
        while True:
            with self._lock:
                if self._current is None or not self._current.will_end:
                    return self._failure
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def wait(self) -> None:
        """As ``join``; raises what stopped the step, until ``retry``."""
        while (failure := self._outcome()) is not None:
            if isinstance(failure, Exception):
                raise let_go(failure)
            self.retry()  # an interrupt was raised where it came

    def retry(self) -> None:
        """Start again what a failure left undone, if there was one that can be repeated."""
        with self._mending:
            self.join()
            if self._left is not None and not isinstance(self._failure, MixedStateError):
                self.submit(*self._left)

    def discard(self) -> list[Subgroup]:
        """Forget a step that was stopped; gives the subgroups that it left as they were."""
        with self._mending:
            self.join()
            left, self._left, self._failure = self._left, None, None
        return [] if left is None else left[1]

    @property
    def failure(self) -> BaseException | None:
        """What stopped the last step, if something did."""
        return self._failure

    @property
    def unfinished(self) -> frozenset[int]:
        """Parameters that the stopped step left, in whole or in part, as they were before it."""
        return frozenset(parts_of(left[1]) if (left := self._left) else ())

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return self._current is None and self._failure is None

    # Speculative passes.

    def speculate(self, step: Step) -> None:
        """Open a pass for an expected step; the pipeline must be idle. None once it is closing."""
        with self._lock:
            assert self.is_idle
            if not self._is_closing:
                self._begin(Pass(step, is_validated=False, is_complete=False, was_speculative=True))

    def feed(self, subgroups: Iterable[Subgroup]) -> None:
        """Add subgroups whose gradients are complete to the speculative pass."""
        with self._lock:
            if self._current is not None and not self._current.is_rolled_back:
                self._add(self._current, subgroups)
                self._changes.tell()

    def validate(self, step: Step, fed: Sequence[Subgroup], rest: Sequence[Subgroup]) -> bool:
        """``step`` is taken, and is what was expected for ``fed``: publish that, then do ``rest``.
        False if an I/O error has stopped the speculative pass; then nothing of the step is done.
        """
        with self._lock:
            work = self._current
            if work is None or work.is_rolled_back:
                return False
            taken = frozenset(job.subgroup.index for job in (*work.held, *work.writing))
            self._weights.begin_update(parts_of([*fed, *rest]), step.updates, taken)
            work.step = step
            work.begun.clear()
            self._add(work, rest)
            work.is_validated = work.is_complete = True
            self._changes.tell()
        return True

    def roll_back(self) -> None:
        """The expected step is not taken: undo the pass and wait until it is gone."""
        if self._undoes():
            self.join()

    def _undoes(self, *, closes: bool = False) -> bool:
        """Whether there is a pass to undo; if it ``closes``, there will be no other."""
        with self._lock:
            self._is_closing = self._is_closing or closes
            if does := self._current is not None and not self._current.is_validated:
                self._current.is_rolled_back = True
            self._changes.tell()
            return does

    def close(self) -> None:
        """Roll speculation back, finish a step under way, then end the thread. Idempotent."""
        try:
            self._undoes(closes=True)
        finally:
            self._undoes(closes=True)  # an interrupt may have come just before
            join_thread(self._thread)

    # The thread.

    def _add(self, work: Pass, subgroups: Iterable[Subgroup]) -> None:
        work.add(subgroups, self._first_use, self._stages.needs_slot)

    def _first_use(self, group: Subgroup) -> tuple[int, int]:
        """Parts of one parameter have the same first use."""
        uses = (self._weights.schedule.first_use(part.parameter) for part in group.segments)
        return min(uses), group.index

    def _begin(self, work: Pass) -> None:
        with self._lock:
            assert self._current is None
            self._current = work  # from here on the thread has it, at its next look at the latest
            self._changes.tell()

    def _run(self) -> None:
        stay_in_background()
        with torch.no_grad():
            self._thread.take_turns(self._turn)

    def _turn(self) -> bool:
        """A pass, or what is left of one where there was no memory. False: there will be none."""
        work = self._next_pass()
        try:
            if work is None:
                return False
            try:
                if work.failure is None:
                    self._pass(work)
            except BaseException as failure:  # kept, and raised where the step is waited for
                work.failure = failure
            if work.failure is not None:
                self._stop(work, let_go(work.failure))
            with self._lock:
                if self._current is work:
                    self._current = None
                self._changes.tell()
            return True
        finally:
            del work  # an error that is kept leads to this frame

    def _next_pass(self) -> Pass | None:
        while True:
            with self._lock:
                work = self._current
                if work is not None and not work.is_taken:
                    self._left = self._failure = None  # of the step before, which this may finish
                    work.is_taken = True
                if work is not None or self._is_closing:
                    return work
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def _pass(self, work: Pass) -> None:
        while self._wait_for_work(work):
            if work.is_rolled_back:
                work.abandon(self._stages)
                return
            self._publish_held(work)
            self._start_reads(work)
            self._finish_written(work, wait=not self._advance(work))

    def _wait_for_work(self, work: Pass) -> bool:
        """Wait until there is something to do; False when the pass is done."""
        while True:
            with self._lock:
                if work.has_work or work.is_complete:
                    return work.has_work
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def _publish_held(self, work: Pass) -> None:
        """What was held back, when the step is taken, in the order of the next forward pass; what
        that wants before, and is still to be updated, comes first.
        """
        if not work.is_validated or not work.held:
            return
        work.order_held(self._first_use)
        coming = (*work.first_waiting, *(job.subgroup for job in work.reading))
        first = min(map(self._first_use, coming), default=None)
        while work.held and (first is None or self._first_use(work.held[0].subgroup) < first):
            if not self._is_published(work.held[0]):
                work.writing.append(work.held[0])
            work.held.popleft()

    def _start_reads(self, work: Pass) -> None:
        while self._overlap or not work.reading:
            group = self._take_next(work)
            if group is None:
                return
            self._start(work, group)

    def _start(self, work: Pass, group: Subgroup, *, visits: bool = False) -> Job:
        is_ahead = not work.is_validated
        try:
            job = self._stages.start_read(work.step, group, is_ahead=is_ahead, is_aside=visits)
            work.reading.append(job)
        except BaseException:
            with self._lock:  # others may be adding to what waits
                needs_slot = self._stages.needs_slot(group)
                (work.ahead if needs_slot else work.in_memory).appendleft(group)
            raise
        return job

    def _take_next(self, work: Pass) -> Subgroup | None:
        """The next subgroup, if it can start; held jobs keep their slots until that is needed."""
        with self._lock:
            if not work.ahead:
                return None
            if not self._stages.can_start(work.ahead[0]):
                idle = next((job for job in work.held if job.slot is not None), None)
                if idle is None:
                    return None
                self._stages.release_slot(idle)
            work.begin(work.ahead[0])
            return work.ahead.popleft()

    def _advance(self, work: Pass) -> bool:
        """Run a kernel: of the oldest job whose bytes are there, or of what is in memory, or else
        of the oldest. False if there is none.
        """
        self._start_visits(work)
        job = next((job for job in work.reading if self._stages.is_read(job)), None)
        job = job or self._start_in_memory(work) or next(iter(work.reading), None)
        if job is None:
            return False
        self._stages.run_kernel(job)
        if work.is_validated:
            self._stages.insert_weights(job)
        self._stages.start_write(job)
        work.reading.remove(job)
        work.writing.append(job)
        return True

    def _start_visits(self, work: Pass) -> None:
        """Of what has nothing to read, what a device has done sooner is left to it."""
        while self._overlap and (job := self._start_in_memory(work, visits=True)) is not None:
            self._stages.start_visit(job)
            work.reading.remove(job)
            work.writing.append(job)

    def _start_in_memory(self, work: Pass, *, visits: bool = False) -> Job | None:
        """The next one that has nothing to read; or, if it ``visits`` a device, the last one."""
        with self._lock:
            waiting, is_sooner = work.in_memory, self._stages.is_sooner_on_device
            if not waiting or (visits and not is_sooner(waiting, is_ahead=not work.is_validated)):
                return None
            group = waiting.pop() if visits else waiting.popleft()
        return self._start(work, group, visits=visits)

    def _finish_written(self, work: Pass, *, wait: bool) -> None:
        """Publish or hold what is written, whatever is older; with ``wait`` at least one job.

        Arrays in host memory, which have nothing to write, are not kept waiting by an SSD.
        """
        wait = wait or not self._overlap
        finished = [job for job in work.writing if self._stages.is_written(job)]
        if wait and not finished:
            finished = sorted(work.writing, key=self._stages.waits_for_device)[:1]
        for job in finished:
            with work.finishing(job):
                self._stages.finish_write(job)
            if not work.is_validated:
                work.held.append(job)
            elif not self._is_published(job):
                continue
            work.writing.remove(job)

    def _is_published(self, job: Job) -> bool:
        """Publish a job that is written, unless its new weights are on their way to a device."""
        self._stages.insert_weights(job)
        if not self._stages.is_written(job):
            return False
        self._stages.publish(job)
        return True

    def _stop(self, work: Pass, failure: BaseException) -> None:
        """Undo a speculative pass; of a step, bring home what can be, keep the rest for ``retry``.
        A failure other than one of our I/O, which comes before or after the rule, may have left
        arrays in host memory half updated; that cannot be repeated. May be called again.
        """
        with self._lock:
            work.is_rolled_back = not work.is_validated
        if work.is_rolled_back:
            self.speculation_failure = failure
            work.abandon(self._stages)
            return
        left = work.bring_home(self._stages)
        may_go_on = isinstance(failure, VisitError) or is_no_room(failure)
        if work.was_speculative and may_go_on and not work.is_unknown:
            self._go_on(work.step, left)
            return
        self._left, self._failure = (work.step, left), failure
        if isinstance(failure, OSError) and not work.is_unknown:
            advise(failure, _REMEDY)
        elif work.stopped_by is None:
            is_known = not (work.is_unknown or isinstance(failure, MemoryError))
            parts = parts_of(left) if is_known else work.step.updates
            touched = parts.keys() & work.step.updates.keys()
            work.stopped_by = self._stages.mixture.stop_step(failure, touched)
        self._failure = work.stopped_by or failure
        self._weights.fail(self._failure)

    def _go_on(self, step: Step, left: list[Subgroup]) -> None:
        """What was held back took the room that the rest needed, or a device failed with that:
        it is published, which frees the versions before it, and the rest is a step of its own.
        """
        again = Pass(step, is_validated=True, is_complete=True)
        self._weights.fail(None)
        self._weights.begin_update(parts_of(left), step.updates, frozenset())
        self._add(again, left)
        with self._lock:
            self._current = again
