"""Updates on a device of what is at home in host memory: a subgroup *visits* the device. Its values
are copied there, updated, and copied to the spare block beside their home.

Processors that have much to update leave a part of it to a device that computes, whose link and
memory have room for it: a visit moves 26 bytes an element through the link, as many as a processor
moves through host memory, and needs no core for them. Which of the two is sooner is told by what
each took lately, see ``Pace``.

Invariants:
- What a visit reads stays as it is until it is over, and where it writes is looked at by nobody.
- A slot of device memory is used again behind all that was done in it. One of a visit whose end
  nobody could wait for is lost, and so is the block that it was to write.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swap.device.interface import ComputeDevice, Event, Stream
from swap.plan.layout import PAGE

Block = Mapping[str, torch.Tensor]
"""The arrays of a subgroup by the names of its components."""
Update = Callable[[Block, torch.Tensor], None]
"""Changes components by a gradient, all on the device, on its current stream."""

_log = logging.getLogger(__name__)
_USED = (Stream.UP, Stream.UPDATE, Stream.BACK)
_FADING = 4095 / 4096
"""A visit that took twice as long as it may is tried again when the processors have done 2,839
subgroups, which are tens of steps, and one that took a hundred times as long after 18,861: a link
that is slow is held up once in so many.
"""


@dataclass(slots=True, eq=False)
class Visit:
    """One subgroup on its way to the device and back; over when ``event`` is done, which is None
    until all of it is asked for.
    """

    device: ComputeDevice
    elements: int
    slot: torch.Tensor
    began: float
    event: Event | None = None
    ended: float | None = None
    """When its end was seen, which may be long before somebody asks for its slot."""
    lost_by: str | None = None
    """Why nobody knows whether it is over. Not the error itself, whose frames refer to this."""

    def done(self) -> bool:
        """Whether it is over, or nobody will know: ``result`` raises that."""
        try:
            if self.event is not None and self.event.done():
                self._has_ended()
        except Exception as failure:  # of a device
            self.lost_by = str(failure)
            return True
        return self.ended is not None

    def result(self) -> None:
        """Wait for its end; of one that could not be asked for, for what of it was. Raises what the
        device raises; it is lost then.
        """
        try:
            if self.event is None:
                for stream in _USED:
                    self.device.record(stream).wait()
            else:
                self.event.wait()
        except Exception as failure:
            self.lost_by = str(failure)
            raise
        self._has_ended()

    def _has_ended(self) -> None:
        if self.ended is None:
            self.ended = time.monotonic()


class Pace:
    """Seconds that an element took lately, here and there. Nothing is known at first, and what was
    not tried for long is known less and less: the link may have been busy then, or the device new.
    """

    def __init__(self) -> None:
        self._here: float | None = None
        self._there: float | None = None

    def took_here(self, elements: int, seconds: float) -> None:
        """The processors, for one subgroup."""
        self._here = _mean(self._here, seconds / max(1, elements))
        if self._there is not None:
            self._there *= _FADING

    def took_there(self, elements: int, seconds: float) -> None:
        """A visit, from its beginning until its end was seen, with others under way."""
        self._there = _mean(self._there, seconds / max(1, elements))

    def is_sooner_there(self, elements: int, waiting: int) -> bool:
        """Whether a visit of so many elements is over before the processors are done with all that
        are ``waiting``, these included. Where that is not known, it is found out.
        """
        if self._here is None or self._there is None:
            return waiting > elements
        return self._there * elements <= self._here * waiting


def _mean(known: float | None, new: float) -> float:
    """What was last counts most, and no single one alone."""
    return new if known is None else (known + new) / 2


class Visits:
    """``num_slots`` of ``slot_bytes`` each of device memory, until ``close``. For one thread.

    Raises ``MemoryError`` where the device has not so much.
    """

    def __init__(self, device: ComputeDevice, slot_bytes: int, num_slots: int) -> None:
        self._device = device
        self._slot_bytes = slot_bytes
        self.nbytes = slot_bytes * num_slots
        self.pace = Pace()
        self._block = device.memory(self.nbytes)
        self._free = deque(
            device.tensor(self._block, number * slot_bytes, slot_bytes, torch.uint8, None)
            for number in range(num_slots)
        )
        self._under_way: list[Visit] = []
        self._is_off = False

    def turn_off(self, failure: object) -> None:
        """No more of them, for that reason."""
        if not self._is_off:
            self._is_off = True
            _log.warning(
                "the device updates nothing of what is in host memory any more, since it failed to "
                "(%s); the processors do; steps may take longer",
                failure,
            )

    def can_begin(self, nbytes: int) -> bool:
        """Whether there is a slot for so many bytes of components and gradient."""
        for visit in [one for one in self._under_way if one.lost_by or one.done()]:
            self._end(visit)
        return bool(self._free) and nbytes <= self._slot_bytes and not self._is_off

    def new(self, elements: int) -> Visit:
        """With a slot, which ``can_begin`` has said that there is, to be given to ``begin``."""
        visit = Visit(self._device, elements, self._free.popleft(), time.monotonic())
        self._under_way.append(visit)
        return visit

    def begin(
        self, visit: Visit, old: Block, gradient: torch.Tensor, new: Block, update: Update
    ) -> None:
        """Start all of it: ``new`` is what ``update`` makes of ``old`` when the visit is done. All
        are flat arrays in registered host memory. Raises what the device and ``update`` raise: then
        some of it may be under way until ``visit.result`` returns.
        """
        sources = [*old.values(), gradient]
        *here, there = _laid_out(visit.slot, sources)
        components = dict(zip(old, here, strict=True))
        for source, target in zip(sources, (*here, there), strict=True):
            self._device.copy(Stream.UP, target, source)
        self._device.wait_for(Stream.UPDATE, self._device.record(Stream.UP))
        for array in here:
            self._device.uses(Stream.UPDATE, array, writes=True)
        self._device.uses(Stream.UPDATE, there)
        with self._device.on(Stream.UPDATE):
            update(components, there)
        self._device.wait_for(Stream.BACK, self._device.record(Stream.UPDATE))
        for name, array in components.items():
            self._device.copy(Stream.BACK, new[name], array)
        visit.event = self._device.record(Stream.BACK)

    def close(self) -> None:
        """Let go of the memory, once no stream is at it any more. Idempotent."""
        for stream in _USED:
            self._device.record(stream).wait()
        self._free.clear()
        self._under_way.clear()
        self._block = None

    def _end(self, visit: Visit) -> None:
        self._under_way.remove(visit)
        if visit.lost_by is not None:
            self.turn_off(visit.lost_by)
            return
        self._free.append(visit.slot)
        if visit.event is not None and visit.ended is not None:
            self.pace.took_there(visit.elements, visit.ended - visit.began)


def _laid_out(slot: torch.Tensor, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Room in a slot for each of ``arrays``, from a page on."""
    found, start = [], 0
    for array in arrays:
        found.append(slot[start : start + array.nbytes].view(array.dtype))
        start += _pages(array.nbytes)
    return found


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages that so many take."""
    return -(-nbytes // PAGE) * PAGE
