"""A device with a clock of its own: a queue of work that takes time, and events in between."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class FakeEvent:
    """As ``torch.cuda.Event(enable_timing=True)``."""

    device: FakeDevice
    number: int = -1
    at: float | None = None

    def record(self, stream: object, /) -> None:
        assert stream is self.device
        self.number, self.at = next(self.device.numbers), None
        self.device.queue.append((self.number, self))

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.device.num_waits += 1
        self.device.run()

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return float(np.float32((end_event.at - self.at) * 1000))


@dataclass(eq=False)
class FakeDevice:
    """Does what it was given when it is told to run. Its clock counts from any moment."""

    now: float = 12_345.0
    num_waits: int = 0
    queue: deque[float | tuple[int, FakeEvent]] = field(default_factory=deque)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def give(self, seconds: float) -> None:
        """Work that takes so long."""
        self.queue.append(seconds)

    def run(self, until: float = math.inf) -> None:
        """All of it, or the work that ends within so many seconds."""
        last = self.now + until
        while self.queue:
            work = self.queue[0]
            if isinstance(work, float):
                if self.now + work > last:
                    return
                self.now += work
            else:
                number, event = work
                if event.number == number:  # else it was recorded again
                    event.at = self.now
            self.queue.popleft()
