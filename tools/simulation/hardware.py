"""What takes time: rates that are shared, and the streams of a device.

Nothing is moved. A piece of work has an amount, and a resource so much a second for all that it
works on: lanes that have something to do get equal parts of it, and do one thing after the other. A
stream does what it is given in order, and waits for events of others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.turns import Turns

_NOTHING_LEFT = 1e-9
"""Seconds of work that are taken for none: what rounding leaves."""


@dataclass(slots=True, eq=False)
class _Work:
    seconds: float
    """That are left, if nothing else is worked on."""
    done: Callable[[], object]


class Resource:
    """A disk in one direction, a link in one, the processors: ``rate`` a second."""

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate = name, rate
        self.amount = self.busy_seconds = 0.0
        self._lanes: dict[object, deque[_Work]] = {}

    def add(self, lane: object, amount: float, done: Callable[[], object]) -> None:
        self.amount += amount
        work = _Work(amount / self.rate, done)
        self._lanes.setdefault(lane, deque()).append(work)

    def next_seconds(self) -> float | None:
        """When the first piece of work is done, from now; None if there is none."""
        heads = [lane[0].seconds for lane in self._lanes.values()]
        return max(0.0, min(heads)) * len(heads) if heads else None

    def advance(self, seconds: float) -> list[_Work]:
        """Work for so long, no longer than ``next_seconds``; gives what is done."""
        if not self._lanes:
            return []
        self.busy_seconds += seconds
        part = seconds / len(self._lanes)
        finished = []
        for name, lane in list(self._lanes.items()):
            lane[0].seconds -= part
            if lane[0].seconds <= _NOTHING_LEFT:
                finished.append(lane.popleft())
            if not lane:
                del self._lanes[name]
        return finished


class Hardware:
    """All resources, and the thread that finishes work on them as simulated time goes on.

    For use where threads take turns: it goes on where all others wait.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._resources: list[Resource] = []
        self._seen = turns.now
        self._is_new = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hardware")
        self._thread.start()

    @property
    def now(self) -> float:
        return self._turns.now

    def resource(self, name: str, rate: float) -> Resource:
        self._resources.append(Resource(name, rate))
        return self._resources[-1]

    def begin(
        self, resource: Resource, lane: object, amount: float, done: Callable[[], object]
    ) -> None:
        """``done`` is called, by the hardware's thread, when ``amount`` has been worked off."""
        self._catch_up()
        resource.add(lane, amount, done)
        self._is_new = True

    def wait(self, is_ready: Callable[[], object]) -> None:
        """Have this thread stand still until ``is_ready``."""
        while not is_ready():
            self._turns.wait(is_ready)

    def spend(self, resource: Resource, lane: object, amount: float) -> None:
        """Have this thread work off ``amount`` itself."""
        finished: list[bool] = []
        self.begin(resource, lane, amount, lambda: finished.append(True))
        self.wait(lambda: finished)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._catch_up()
            self._is_new = False
            found = [r.next_seconds() for r in self._resources]
            seconds = min((s for s in found if s is not None), default=None)
            self._turns.wait(self._has_news, -1 if seconds is None else seconds)

    def _has_news(self) -> bool:
        return self._is_new or self._is_closed

    def _catch_up(self) -> None:
        """Everything that is done by now is told, in the order in which it was."""
        while True:
            left = self.now - self._seen
            found = [r.next_seconds() for r in self._resources]
            step = min((s for s in found if s is not None), default=None)
            if step is None or step > left + _NOTHING_LEFT:
                self._advance(left)
                return
            self._advance(step)

    def _advance(self, seconds: float) -> None:
        self._seen += seconds
        finished = [work for r in self._resources for work in r.advance(seconds)]
        for work in finished:
            work.done()


@dataclass(slots=True, eq=False)
class Moment:
    """An event of a stream; ``at`` is when it came."""

    hardware: Hardware
    has_come: bool = False
    at: float = 0.0
    _then: list[Callable[[], object]] = field(default_factory=list)

    def done(self) -> bool:
        return self.has_come

    def wait(self) -> None:
        self.hardware.wait(lambda: self.has_come)

    def come(self) -> None:
        self.has_come, self.at = True, self.hardware.now
        for call in self._then:
            call()
        self._then.clear()

    def then(self, call: Callable[[], object]) -> None:
        """``call`` when it comes, at once if it has."""
        if self.has_come:
            call()
        else:
            self._then.append(call)


class Queue:
    """A stream: work in order, each piece on some resource."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._items: deque[Moment | tuple[Moment] | tuple[Resource, float]] = deque()
        self._is_busy = False

    def work(self, resource: Resource, amount: float) -> None:
        self._items.append((resource, amount))
        self._go_on()

    def record(self) -> Moment:
        moment = Moment(self._hardware)
        self._items.append(moment)
        self._go_on()
        return moment

    def wait_for(self, moment: Moment) -> None:
        self._items.append((moment,))
        self._go_on()

    def _go_on(self) -> None:
        while self._items and not self._is_busy:
            item = self._items[0]
            if isinstance(item, Moment):
                self._items.popleft()
                item.come()
            elif len(item) == 2:
                self._is_busy = True
                self._hardware.begin(*_on(item, self), self._worked)
            elif item[0].done():
                self._items.popleft()
            else:
                self._is_busy = True
                item[0].then(self._worked)

    def _worked(self) -> None:
        self._items.popleft()
        self._is_busy = False
        self._go_on()


def _on(item: tuple[Resource, float], lane: object) -> tuple[Resource, object, float]:
    return item[0], lane, item[1]
