"""Values of the program on a device that the host changes: down through slots of registered host
memory, and up again.

A *load* is what one slot carries at once: weights, which come back changed, and gradients, which
only come down. Loads come down in the order in which they are expected, as slots are free, while
the host works on one that has arrived; what it has changed goes up while it works on the next.

Invariants:
- What is copied comes behind all that the calling thread computes at the time, in both directions.
- From the change of a value until its copy up is over, a slot is its only place. The load is *kept*
  until then: a copy that failed is made again by ``finish``.
- A slot is used again when the host has seen the end of its copies, by a wait that succeeded.
  Until then the load is held, and with it both ends of the copies, so that neither is given to
  anybody else: also where nothing is wanted of it any more (it is *ending*).
- Nothing is on its way when ``finish`` or ``settle`` has returned, so the program may let go of
  what was copied, and write to it. ``abandon`` tries to wait for that, too, and may fail to; what
  the program computes later on the device comes behind the copies all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from aio import Slab
from swap.device.interface import ComputeDevice, Event, Stream


@dataclass(frozen=True, slots=True)
class Place:
    """``numel`` elements of ``dtype`` from byte ``start`` of a slot on."""

    start: int
    numel: int
    dtype: torch.dtype

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        nbytes = self.numel * self.dtype.itemsize
        return slot[self.start : self.start + nbytes].view(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Some weights of one parameter and their gradient, and where a slot has them.

    ``weight`` is a flat tensor on the device. So is what ``gradient`` gives, which may compute it
    on the current stream when it is called.
    """

    parameter: int
    weight: torch.Tensor
    gradient: Callable[[], torch.Tensor]
    weight_place: Place
    gradient_place: Place


@dataclass(slots=True, eq=False)
class Load:
    """Items of one slot. The host has changed the weights of the first ``num_changed``."""

    items: Sequence[Item]
    num_changed: int = 0
    slot: torch.Tensor | None = None
    event: Event | None = None
    """Behind the copies that were started last; None where some are to be started still."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """What comes down, until it has."""

    def weight(self, item: Item) -> torch.Tensor:
        """In the slot, of a load that has arrived."""
        assert self.slot is not None
        return item.weight_place.of(self.slot)

    def gradient(self, item: Item) -> torch.Tensor:
        """In the slot, of a load that has arrived."""
        assert self.slot is not None
        return item.gradient_place.of(self.slot)


class Link:
    """Of one device, through ``num_slots`` equal parts of ``slab``. For one thread at a time.

    The slab is registered with the device, by whoever closes it. All methods raise what the device
    raises (``RuntimeError``); until ``abandon`` is called then, copies may be on their way.
    """

    def __init__(self, device: ComputeDevice, slab: Slab, num_slots: int) -> None:
        self._device = device
        self.slot_bytes = slab.nbytes // num_slots
        whole = torch.from_numpy(slab.allocate(self.slot_bytes * num_slots))
        self._free = deque(whole.split(self.slot_bytes))
        # Each load that has a slot is in one of these; from the left, the oldest comes first.
        self._coming: deque[Load] = deque()  # has none yet
        self._arriving: deque[Load] = deque()
        self._at_work: deque[Load] = deque()
        self._leaving: deque[Load] = deque()
        self._ending: deque[Load] = deque()

    @property
    def kept(self) -> set[int]:
        """Parameters of which changed weights are not known to be on the device."""
        loads = (*self._at_work, *self._leaving)
        return {item.parameter for load in loads for item in load.items[: load.num_changed]}

    def expect(self, loads: Iterable[Load]) -> None:
        """These are worked on after all others that are expected: bring them as slots are free."""
        self._coming.extend(loads)
        self._start()

    def arrive(self, load: Load) -> None:
        """Wait until ``load`` is in its slot, the next one in order, to be worked on until
        ``leave``.
        """
        self._start()
        while not self._arriving:
            self._wait_for_slot()
            self._start()
        assert load is self._arriving[0], "loads are worked on in the order of their expectation"
        assert load.event is not None
        load.event.wait()
        load.sources.clear()
        self._at_work.append(self._arriving.popleft())

    def leave(self, load: Load) -> None:
        """It was worked on: start what was changed on its way up, and what comes next down."""
        self._at_work.remove(load)
        self._leaving.append(load)
        self._send(load)
        self._start()

    def finish(self) -> None:
        """Wait until all that was changed is on the device, and nothing is on its way; what could
        not be copied before is copied again. What fails is kept, for a further call.
        """
        self._end()
        for load in self._leaving:
            if load.event is None:
                self._send(load)
        while self._leaving:
            self._wait_for_slot()

    def abandon(self) -> None:
        """After an error, which is on its way: give up what comes, and see what was changed on its
        way up. What does not get there is kept, and fails again in ``finish``.
        """
        self._coming.clear()
        self._ending.extend(self._arriving)
        self._arriving.clear()
        for load in self._at_work:
            load.event = None
        self._leaving.extend(self._at_work)
        self._at_work.clear()
        for wait in (self._end, self.finish, self._order, self.settle):
            with suppress(Exception):  # the first failure is the one that is reported
                wait()

    def settle(self) -> None:
        """Wait until nothing is on its way; after ``abandon``. Of any load that is still held, some
        copies may have been started.
        """
        if self._leaving or self._ending:
            for stream in (Stream.DOWN, Stream.UP):
                self._device.record(stream).wait()

    def forget(self) -> None:
        """Nobody wants any more what is kept. Right after ``settle``: raises nothing."""
        for loads in (self._leaving, self._ending):
            while loads:
                self._release(loads.popleft())

    def _end(self) -> None:
        """Give back the slots of what nobody wants any more."""
        if self._ending:
            self.settle()
        while self._ending:
            self._release(self._ending.popleft())

    def _order(self) -> None:
        """What is computed from now on comes behind what is on its way."""
        if self._leaving or self._ending:
            for stream in (Stream.DOWN, Stream.UP):
                self._device.wait_for(Stream.COMPUTE, self._device.record(stream))

    def _start(self) -> None:
        """As many as there are slots for."""
        while self._leaving and self._is_up(self._leaving[0]):
            self._release(self._leaving.popleft())
        while self._coming and self._free:
            load = self._coming[0]
            load.slot, load.event = self._free.popleft(), None
            self._arriving.append(self._coming.popleft())
            self._fetch(load, load.slot)

    def _fetch(self, load: Load, slot: torch.Tensor) -> None:
        targets: list[torch.Tensor] = []
        for item in load.items:
            load.sources += (item.weight, item.gradient())
            targets += (item.weight_place.of(slot), item.gradient_place.of(slot))
        self._copy(load, Stream.DOWN, zip(targets, load.sources, strict=True))

    def _send(self, load: Load) -> None:
        self._copy(load, Stream.UP, self._changes_of(load))

    def _changes_of(self, load: Load) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for item in load.items[: load.num_changed]:
            yield item.weight, load.weight(item)

    def _copy(
        self, load: Load, stream: Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        load.event = None
        self._device.wait_for(stream, self._device.record(Stream.COMPUTE))
        for target, source in pairs:
            self._device.copy(stream, target, source)
        load.event = self._device.record(stream)

    def _is_up(self, load: Load) -> bool:
        return load.event is not None and load.event.done()

    def _wait_for_slot(self) -> None:
        """Of the load that began to leave first."""
        event = self._leaving[0].event
        assert event is not None
        try:
            event.wait()
        except BaseException:
            for load in self._leaving:  # nobody knows which of them were copied
                load.event = None
            raise
        self._release(self._leaving.popleft())

    def _release(self, load: Load) -> None:
        load.sources.clear()
        if load.slot is not None:
            self._free.append(load.slot)
        load.slot = None
