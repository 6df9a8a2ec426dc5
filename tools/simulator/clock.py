"""Simulated time: processes that wait for signals, lanes, and machines that several jobs share.

A process is a generator that yields the signals it waits for. Everything that happens at one moment
happens in the order in which it was asked for, so a simulation gives the same result every time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

Process = Generator["Signal", None, None]
_MOMENT_SECONDS = 1e-9
"""A job that would end within this has ended: shorter times are lost in the sum that ``now`` is."""


class Signal:
    """Something that happens once."""

    def __init__(self, clock: Clock) -> None:
        self.is_set = False
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        """It has happened; who waits goes on at this moment."""
        if not self.is_set:
            self.is_set = True
            for action in self._waiting:
                self._clock.after(0.0, action)
            self._waiting = []

    def then(self, action: Callable[[], None]) -> None:
        """Do ``action`` when it happens."""
        assert not self.is_set
        self._waiting.append(action)


class Clock:
    """What happens when. ``now`` is in seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def timer(self, seconds: float) -> Signal:
        """Set in so many seconds."""
        signal = Signal(self)
        self.after(seconds, signal.set)
        return signal

    def start(self, process: Process) -> Signal:
        """Run ``process`` from this moment on; the signal is set when it ends."""
        ended = Signal(self)
        self.after(0.0, lambda: self._advance(process, ended))
        return ended

    def run_until(self, signal: Signal) -> None:
        """Raises ``RuntimeError`` if nothing is left to happen and ``signal`` is not set: processes
        then wait for one another.
        """
        while not signal.is_set:
            if not self._queue:
                raise RuntimeError(f"at {self.now} s everything waits and nothing is under way")
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _advance(self, process: Process, ended: Signal) -> None:
        for signal in process:
            if not signal.is_set:
                signal.then(lambda: self._advance(process, ended))
                return
        ended.set()


class Lane:
    """Jobs one after the other, in the order in which they were submitted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: Signal | None = None

    def submit(self, job: Process) -> Signal:
        self._last = self._clock.start(_after(self._last, job))
        return self._last


def _after(before: Signal | None, job: Process) -> Process:
    if before is not None:
        yield before
    yield from job


@dataclass(slots=True, eq=False)
class _Job:
    kind: str
    amount: float
    left: float
    done: Signal


class Shared:
    """A machine that jobs use at once. ``speeds``: the amount of each kind of job that it does in a
    second when it does nothing else; jobs of one kind share that evenly.

    ``together`` bounds all kinds at once: the speeds of the kinds at work, each multiplied by its
    weight, add up to no more. Without ``weights`` amounts are added as they are (bytes read and
    bytes written); with ``weights = 1 / speed`` and ``together = 1`` kinds take turns (cores).
    """

    def __init__(
        self,
        clock: Clock,
        speeds: Mapping[str, float],
        *,
        together: float = float("inf"),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._clock = clock
        self._speeds = speeds
        self._together = together
        self._weights = weights or dict.fromkeys(speeds, 1.0)
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._version = 0
        self.done = dict.fromkeys(speeds, 0.0)
        self.busy_seconds = 0.0

    def use(self, kind: str, amount: float) -> Signal:
        """A job of ``amount``; set when it is done. An infinite speed does it at once."""
        done = Signal(self._clock)
        if amount <= 0 or self._speeds[kind] == float("inf"):
            self.done[kind] += max(0.0, amount)
            done.set()
            return done
        self._work()
        self._jobs.append(_Job(kind, amount, amount, done))
        self._look_ahead()
        return done

    def _rates(self) -> dict[str, float]:
        """Amount a second of one job of each kind at work."""
        counts = dict.fromkeys(self._speeds, 0)
        for job in self._jobs:
            counts[job.kind] += 1
        active = [kind for kind, count in counts.items() if count]
        wanted = sum(self._speeds[kind] * self._weights[kind] for kind in active)
        scale = min(1.0, self._together / wanted) if wanted else 1.0
        return {kind: scale * self._speeds[kind] / counts[kind] for kind in active}

    def _work(self) -> None:
        """Account for what was done since the last change."""
        seconds, self._since = self._clock.now - self._since, self._clock.now
        if not self._jobs or not seconds:
            return
        self.busy_seconds += seconds
        rates = self._rates()
        for job in self._jobs:
            moved = min(job.left, rates[job.kind] * seconds)
            job.left -= moved
            self.done[job.kind] += moved

    def _look_ahead(self) -> None:
        self._version += 1
        if self._jobs:
            rates = self._rates()
            seconds = min(job.left / rates[job.kind] for job in self._jobs)
            version = self._version
            self._clock.after(seconds, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._work()
        rates = self._rates()
        shortest = min(job.left / rates[job.kind] for job in self._jobs) + _MOMENT_SECONDS
        left = [job for job in self._jobs if job.left > shortest * rates[job.kind]]
        ended = [job for job in self._jobs if job not in left]
        self._jobs = left
        self._look_ahead()
        for job in ended:
            job.done.set()
