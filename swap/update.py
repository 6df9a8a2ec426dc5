"""The optimizer pipeline: read, kernel and write-back of different subgroups at once, behind the
training loop.

One thread walks the subgroups in the order in which the next forward pass needs them. It starts
reads for as many subgroups as there are staging slots, runs the kernel on the oldest one that has
arrived, and starts its write-back; the lanes of the engine do the transfers meanwhile. Whoever
waits for weights is let go as soon as the kernel is done with them.

A failure leaves every subgroup either before or after the step, and ``retry`` finishes what was not
done. Follows ZeRO-Infinity (arXiv 2104.07857, section 5.2.2) in overlapping the stages;
copy-on-write and retrying are ours.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch

from swap.layout import Subgroup
from swap.stages import Job, Stages, Step
from swap.weights import WeightCache


class UpdatePipeline:
    """Runs steps on a thread of its own, one at a time. ``overlap=False`` does one transfer after
    the other.
    """

    def __init__(self, stages: Stages, weights: WeightCache, *, overlap: bool = True) -> None:
        self._stages = stages
        self._weights = weights
        self._overlap = overlap
        self._work: queue.SimpleQueue[tuple[Step, list[Subgroup]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self._left: tuple[Step, list[Subgroup]] | None = None
        self._thread = threading.Thread(target=self._run, name="infinity-update", daemon=True)
        self._thread.start()

    def submit(self, step: Step, subgroups: Sequence[Subgroup]) -> None:
        """Start a step over ``subgroups`` in the order given. The one before must have been waited
        for.
        """
        assert self._idle.is_set()
        assert self._failure is None
        self._weights.begin_update(parts_of(subgroups), step.updates)
        self._idle.clear()
        self._work.put((step, list(subgroups)))

    def wait(self) -> None:
        """Wait until the step is finished and at home; raises what stopped it, until ``retry``."""
        self._idle.wait()
        if self._failure is not None:
            raise self._failure

    def retry(self) -> None:
        """Start again what a failure left undone; does nothing when there was none."""
        self._idle.wait()
        if self._left is not None:
            (step, subgroups), self._left, self._failure = self._left, None, None
            self.submit(step, subgroups)

    @property
    def failure(self) -> BaseException | None:
        """What stopped the last step, if something did."""
        return self._failure

    def close(self) -> None:
        """Finish the step under way, then end the thread. Idempotent."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            step, subgroups = work
            with torch.no_grad():
                self._pass(step, deque(subgroups))
            self._idle.set()

    def _pass(self, step: Step, ahead: deque[Subgroup]) -> None:
        """One step. ``ahead``: not started; ``reading``: in slots, before the kernel; ``writing``:
        after it.
        """
        reading: deque[Job] = deque()
        writing: deque[Job] = deque()
        try:
            while ahead or reading or writing:
                self._start_reads(step, ahead, reading)
                if reading:
                    self._advance(step, reading, writing)
                self._publish_written(writing, wait=not reading)
        except BaseException as failure:  # kept, and raised to whoever waits for the step
            self._stop(step, failure, ahead, reading, writing)

    def _start_reads(self, step: Step, ahead: deque[Subgroup], reading: deque[Job]) -> None:
        while ahead and self._stages.can_start(ahead[0]) and (self._overlap or not reading):
            job = self._stages.start_read(step, ahead[0])
            ahead.popleft()
            reading.append(job)

    def _advance(self, step: Step, reading: deque[Job], writing: deque[Job]) -> None:
        job = reading[0]
        self._stages.run_kernel(step, job)
        self._stages.start_write(job)
        writing.append(reading.popleft())

    def _publish_written(self, writing: deque[Job], *, wait: bool) -> None:
        """Publish, oldest first, what is written; with ``wait`` at least one job, so that its slot
        comes back.
        """
        wait = wait or not self._overlap
        while writing and (wait or self._stages.is_written(writing[0])):
            self._stages.publish(writing[0])
            writing.popleft()
            wait = not self._overlap

    def _stop(
        self,
        step: Step,
        failure: BaseException,
        ahead: deque[Subgroup],
        reading: deque[Job],
        writing: deque[Job],
    ) -> None:
        """Bring home what can be, undo the rest, and keep it for ``retry`` if the failure was one
        of I/O.

        Any other failure may have left arrays in host memory half updated; that cannot be repeated.
        """
        left: list[Subgroup] = []
        for job in writing:
            try:
                self._stages.publish(job)
            except Exception:  # the first failure is the one that is reported
                self._stages.abandon(job)
                left.append(job.subgroup)
        for job in reading:
            self._stages.abandon(job)
            left.append(job.subgroup)
        if isinstance(failure, OSError):
            self._left = (step, [*left, *ahead])
        self._failure = failure
        self._weights.fail(failure)


def parts_of(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """For each parameter that has a part in ``subgroups``, their indices."""
    parts: dict[int, tuple[int, ...]] = {}
    for subgroup in subgroups:
        for segment in subgroup.segments:
            parts[segment.parameter] = (*parts.get(segment.parameter, ()), subgroup.index)
    return parts
