"""What is known to come before what, by vector clocks.

Each stream counts what it does. A clock says, of every stream, up to which of its acts one comes
after it; the host has one, too, for all its threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swap.device.interface import Stream

Clock = dict[Stream, int]


class OrderError(AssertionError):
    """What was asked of the device is not ordered, or uses memory that is not there."""


def merge(clock: Clock, other: Clock) -> None:
    """Whatever comes after ``other`` comes after ``clock``, too."""
    for stream, act in other.items():
        clock[stream] = max(clock.get(stream, 0), act)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEvent:
    """A moment: ``stream`` has done ``position`` of the items of its queue, and what ``clock`` says
    has been done. Recorded by ``thread``, in that ``turn`` of it.
    """

    device: Any
    stream: Stream
    position: int
    clock: Clock
    thread: int
    turn: int

    def done(self) -> bool:
        is_done: bool = self.device.is_done(self)
        return is_done

    def wait(self) -> None:
        self.device.wait(self)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes ``[start, stop)`` of a region, by act number ``act`` of ``stream``."""

    start: int
    stop: int
    stream: Stream
    act: int
    is_write: bool

    def conflicts(self, start: int, stop: int, *, is_write: bool) -> bool:
        overlaps = self.start < stop and start < self.stop
        return overlaps and (self.is_write or is_write)


class Region:
    """Memory whose accesses have to be ordered: what ``name`` tells of it."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.accesses: list[Access] = []
        self.used_by: set[Stream] = set()
        """Streams that may access it at any time, as operations of torch do."""
        self.fault: str | None = None
        """Why its values are wrong, if they are."""

    def access(self, stream: Stream, clock: Clock, reach: tuple[int, int], *, writes: bool) -> None:
        """The next act of ``stream`` accesses bytes of it, with what ``clock`` says before.

        Raises ``OrderError`` if an access that must come before does not.
        """
        start, stop = reach
        verb = "writes" if writes else "reads"
        for other in self.accesses:
            if not other.conflicts(start, stop, is_write=writes):
                continue
            if other.stream is not stream and clock.get(other.stream, 0) < other.act:
                raise OrderError(
                    f"{stream.value} {verb} bytes {start} to {stop} of {self.name}, and does not "
                    f"wait for {other.stream.value}, which "
                    f"{'writes' if other.is_write else 'reads'} them before"
                )
        if self.fault is not None and not writes:
            raise OrderError(f"{stream.value} reads {self.name}: {self.fault}")
        self._note(Access(start, stop, stream, clock.get(stream, 0) + 1, writes))

    def _note(self, access: Access) -> None:
        self.accesses = [
            other
            for other in self.accesses
            if other.stream is not access.stream
            or other.is_write > access.is_write
            or not (access.start <= other.start and other.stop <= access.stop)
        ]
        self.accesses.append(access)

    def last_acts(self) -> Clock:
        """The last access of each stream."""
        clock: Clock = {}
        for access in self.accesses:
            merge(clock, {access.stream: access.act})
        return clock

    def begin_after(self, clock: Clock) -> None:
        """Whatever is done to it comes after what was done to memory that it takes the place of."""
        self.accesses = [Access(0, self.nbytes, s, act, True) for s, act in clock.items()]

    def unfinished(self, clock: Clock) -> Access | None:
        """An access that whoever has ``clock`` does not know to be over."""
        late = (a for a in self.accesses if clock.get(a.stream, 0) < a.act)
        return next(late, None)
