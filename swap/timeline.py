"""What happened when: reads, writes, kernels, compute and stalls, for reports and traces.

Events are kept in a bounded ring, totals for the whole life. Times are ``time.perf_counter``
seconds. What a device does is recorded between marks, and counted once it has come to the second.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aio import Operation
from swap.marks import Mark

KINDS = ("read", "write", "kernel", "forward", "backward", "copy", "stall")
PURPOSES = ("weights", "state", "gradients", "activations")
"""What reads and writes are for; ``state`` is what an optimizer keeps beside the weights."""
_PURPOSES = frozenset(PURPOSES)
_RING = 50_000
"""Events that are kept: some 150 bytes each, which no budget counts."""
_UNSTEADY_STEPS = 3
"""The first step reads no moments and follows no plan, and shows in what the next two move."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something of ``kind`` between ``start`` and ``stop`` (seconds), moving ``nbytes``."""

    kind: str
    start: float
    stop: float
    nbytes: int
    label: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of training state, activations not among them, that were read and written, and the
    seconds that it took.
    """

    read: int = 0
    written: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Span:
    """Something between two marks that may lie ahead."""

    kind: str
    start: Mark
    stop: Mark

    def event(self) -> Event | None:
        """What it was; None before its end."""
        stop = self.stop.seconds()
        start = None if stop is None else self.start.seconds()
        if start is None or stop is None:
            return None
        return Event(self.kind, start, stop, 0, "")


class Timeline:
    """Thread-safe collector of events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_RING)
        self._open: deque[_Span] = deque()
        self._lock = threading.Lock()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nbytes: defaultdict[str, int] = defaultdict(int)
        self.count: defaultdict[str, int] = defaultdict(int)
        self.moved: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._num_marks = 0
        self._steady_since = self._last_mark = Moved()
        self.started_at = time.perf_counter()

    def add(
        self,
        kind: str,
        start: float,
        stop: float,
        *,
        nbytes: int = 0,
        label: str = "",
        purposes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``purposes``: for what how many of the bytes are, if they are training state."""
        label = sys.intern(label)  # the same few, again and again
        with self._lock:
            self._note(Event(kind, start, stop, nbytes, label))
            for purpose, part in purposes.items():
                self.moved[kind, purpose] += part

    def _note(self, event: Event) -> None:
        """With the lock held."""
        self._events.append(event)
        self.seconds[event.kind] += event.stop - event.start
        self.nbytes[event.kind] += event.nbytes
        self.count[event.kind] += 1

    def add_between(self, kind: str, start: Mark, stop: Mark) -> None:
        """What a device does between two marks, which are not moved any more."""
        self._open.append(_Span(kind, start, stop))
        with self._lock:
            self._close_spans()

    def _close_spans(self) -> None:
        """Record what devices have come to the end of, in the order in which it was added; with the
        lock held.
        """
        while self._open and (event := self._open[0].event()) is not None:
            self._open.popleft()
            self._note(event)

    @contextmanager
    def span(self, kind: str, *, label: str) -> Iterator[None]:
        """Record the body as one event, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, start, time.perf_counter(), label=label)

    def watch(
        self, operation: Operation, label: str, *, purpose: str | Mapping[str, int]
    ) -> Operation:
        """Record ``operation``, which is for one of ``PURPOSES`` or for so many bytes each of
        several, when it is reaped; return it.
        """
        buffer: Any = operation.request.buffer
        nbytes = memoryview(buffer).nbytes
        purposes = {purpose: nbytes} if isinstance(purpose, str) else purpose
        assert purposes.keys() <= _PURPOSES
        operation.add_done_callback(self._recorder(label, purposes, nbytes))
        return operation

    def mark_step(self) -> None:
        """A step is being taken: see ``moved_per_step``."""
        now = Moved(self._moved("read"), self._moved("write"), time.perf_counter())
        self._num_marks += 1
        if self._num_marks <= _UNSTEADY_STEPS:
            self._steady_since = now
        self._last_mark = now

    def moved_per_step(self) -> Moved | None:
        """Means over the steps after the first few, None before there are such.

        Transfers that overlap a step count when they end, so single steps differ by what was in
        flight when they were taken; the mean does less so with every step.
        """
        steps = self._num_marks - _UNSTEADY_STEPS
        if steps < 1:
            return None
        first, last = self._steady_since, self._last_mark
        return Moved(
            read=round((last.read - first.read) / steps),
            written=round((last.written - first.written) / steps),
            seconds=(last.seconds - first.seconds) / steps,
        )

    def _moved(self, kind: str) -> int:
        with self._lock:
            return sum(self.moved[kind, purpose] for purpose in PURPOSES[:-1])

    def events(self, since: float = 0.0) -> list[Event]:
        """Events that ended after ``since``, in the order in which they were noted. Of those of a
        device, and in totals of them, are then the ones that it has come to the end of.
        """
        # A handler of a signal may have come within the lock, on this thread.
        if not self._lock.locked():
            with self._lock:
                self._close_spans()
        # Copied in one step, not under the lock: a handler of a signal that came within it on the
        # main thread could call what has other threads add events.
        return [event for event in list(self._events) if event.stop > since]

    def _recorder(
        self, label: str, purposes: Mapping[str, int], nbytes: int
    ) -> Callable[[Operation], Any]:
        def record(operation: Operation) -> None:
            start, stop = operation.started_at, operation.finished_at
            kind = operation.request.kind
            self.add(kind, start, stop, nbytes=nbytes, label=label, purposes=purposes)

        return record


def busy_seconds(events: Sequence[Event], kinds: Sequence[str]) -> float:
    """Seconds in which at least one event of one of ``kinds`` was under way."""
    return _seconds_with(events, [tuple(kinds)])


def overlap_seconds(events: Sequence[Event], *groups: Sequence[str]) -> float:
    """Seconds in which every one of ``groups`` (tuples of kinds) had an event under way at once."""
    return _seconds_with(events, [tuple(group) for group in groups])


def without(events: Sequence[Event], kinds: Sequence[str], hole: str) -> list[Event]:
    """The events of ``kinds``, cut wherever an event of kind ``hole`` was under way."""
    holes = sorted((event.start, event.stop) for event in events if event.kind == hole)
    pieces = []
    for event in events:
        if event.kind not in kinds:
            continue
        start = event.start
        for low, high in holes:
            if high > start and low < event.stop:
                if low > start:
                    pieces.append(Event(event.kind, start, low, 0, event.label))
                start = high
        if start < event.stop:
            pieces.append(Event(event.kind, start, event.stop, 0, event.label))
    return pieces


def _seconds_with(events: Sequence[Event], groups: Sequence[tuple[str, ...]]) -> float:
    edges: list[tuple[float, int, int]] = []
    for event in events:
        for index, kinds in enumerate(groups):
            if event.kind in kinds:
                edges.append((event.start, index, 1))
                edges.append((event.stop, index, -1))
    edges.sort()
    active = [0] * len(groups)
    total, since = 0.0, 0.0
    for at, index, change in edges:
        if all(active):
            total += at - since
        active[index] += change
        since = at
    return total
