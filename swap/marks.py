"""Moments for the timeline, on the host and on a device, in seconds of ``time.perf_counter``.

What a device is given it does later. So a moment of it is an event that is recorded between what it
is given, and whose time is looked up when the device has come to it. Nothing here waits for the
device, but once as the first mark is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

_STRIDE_SECONDS = 1.0
"""Events tell the milliseconds between them as float32: over a second, to 0.1 microseconds."""


class Mark(Protocol):
    """A moment. Where it is that of a device, it may lie ahead."""

    def move(self) -> None:
        """To now: on a device, to when all is done that the calling thread has given it so far."""

    def seconds(self) -> float | None:
        """When it was; None if it is still to come. Never waits."""


class HostMark:
    """The moment at which it was made or moved."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def move(self) -> None:
        self._at = time.perf_counter()

    def seconds(self) -> float | None:
        return self._at


class TimedEvent(Protocol):
    """What ``torch.cuda.Event(enable_timing=True)`` is."""

    def record(self, stream: Any, /) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class DeviceMarks:
    """Makes marks on a device, by events that ``new_event`` makes and ``stream`` is for."""

    def __init__(self, new_event: Callable[[], TimedEvent], stream: Callable[[], object]) -> None:
        self._new_event, self._stream = new_event, stream
        event = self.recorded()
        event.synchronize()
        self._anchor = event, time.perf_counter()

    def __call__(self) -> DeviceMark:
        """A mark now."""
        return DeviceMark(self)

    def recorded(self) -> TimedEvent:
        """A new event, recorded now."""
        event = self._new_event()
        self.record(event)
        return event

    def record(self, event: TimedEvent) -> None:
        event.record(self._stream())

    def when(self, event: TimedEvent) -> float:
        """The time of one that has come, and is not recorded again."""
        anchor, at = self._anchor
        seconds = at + anchor.elapsed_time(event) / 1000
        if seconds > at + _STRIDE_SECONDS:
            self._anchor = event, seconds
        return seconds


class DeviceMark:
    """An event, until its time is known."""

    __slots__ = ("_event", "_marks", "_seconds")

    def __init__(self, marks: DeviceMarks) -> None:
        self._marks = marks
        self._event: TimedEvent | None = marks.recorded()
        self._seconds: float | None = None

    def move(self) -> None:
        self._seconds = None
        if self._event is None:  # others are timed by it now
            self._event = self._marks.recorded()
        else:
            self._marks.record(self._event)

    def seconds(self) -> float | None:
        event = self._event
        if event is not None and event.query():
            self._seconds = self._marks.when(event)
            self._event = None
        return self._seconds


def marks_on(device: torch.device) -> Callable[[], Mark]:
    """Makes marks of what is computed on a device, by the streams that computing threads use."""
    if device.type != "cuda":
        return HostMark
    new_event = partial(torch.cuda.Event, enable_timing=True)
    return DeviceMarks(new_event, partial(torch.cuda.current_stream, device))
