"""Updates on a device of what is at home in host memory: a subgroup *visits* the device. Its values
are copied there, updated, and copied to the spare block beside their home.

Processors that have much to update leave a part of it to a device that computes, whose link and
memory have room for it: a visit moves 26 bytes an element through the link, as many as a processor
moves through host memory, and needs no core for them. How many make a step shorter follows from how
fast both are, see ``Pace``.

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
_MOST_PART = 0.9
_MOST_CREDIT = 4.0
"""Subgroups that may visit in a row."""
_MEASUREMENTS = 4
"""Of the link, of which the shortest counts: the first one touches memory, and this process may
not get a processor in another.
"""


@dataclass(slots=True, eq=False)
class Visit:
    """One subgroup on its way to the device and back; over when ``event`` is done, which is None
    until all of it is asked for, or what could be has been waited for.
    """

    device: ComputeDevice
    elements: int
    slot: torch.Tensor
    event: Event | None = None
    lost_by: str | None = None
    """Why nobody knows whether it is over. Not the error itself, whose frames refer to this."""

    def done(self) -> bool:
        """Whether it is over, or nobody will know: ``result`` raises that."""
        try:
            return self.event is not None and self.event.done()
        except Exception as failure:  # of a device
            self.lost_by = str(failure)
            return True

    def result(self) -> None:
        """Wait for its end; of one that could not be asked for, for what of it was. Raises what the
        device raises; it is lost then.
        """
        try:
            if self.event is None:
                self.event = _all_done(self.device)
            else:
                self.event.wait()
        except Exception as failure:
            self.lost_by = str(failure)
            raise


class Pace:
    """Which part of all elements is to visit: ``link`` carries a byte in so many seconds, each way.

    The link has weights and gradients to carry, too. Let an element take c seconds here and u
    there, and what is carried of it in any case w: its weights, for two passes. (Of what comes back
    it is less, a gradient.) With a part x of all elements there, both are done at once where
    ``(1 - x) c = w + x u``; more would hold up passes, and fewer the update.
    """

    def __init__(self, link: float) -> None:
        self._link = link
        self._here: float | None = None
        self._credit = 0.0
        """Elements that may go there, for those that were updated here."""

    def took_here(self, elements: int, nbytes: int, weight_bytes: int, seconds: float) -> None:
        """The processors, for a subgroup whose visit would carry so many bytes to the device, its
        weights among them.
        """
        each = seconds / max(1, elements)
        self._here = each if self._here is None else (self._here + each) / 2
        there = self._link * nbytes / max(1, elements)
        anyway = 2 * self._link * weight_bytes / max(1, elements)
        part = (self._here - anyway) / max(self._here + there, 1e-12)
        part = min(max(part, 0.0), _MOST_PART)
        most = _MOST_CREDIT * elements
        self._credit = min(self._credit + elements * part / (1.0 - part), most)

    def went_there(self, elements: int) -> None:
        """A visit begins."""
        self._credit -= elements

    def is_sooner_there(self, elements: int, nbytes: int, waiting: int) -> bool:
        """Whether a visit of so many elements is over before the processors are done with all that
        are ``waiting``, these included, and is one of the part that is to go there.
        """
        if self._here is None or self._credit < elements:
            return False
        return 2 * self._link * nbytes <= self._here * waiting


class Visits:
    """``num_slots`` of ``slot_bytes`` each of device memory, until ``close``. For one thread.

    Raises ``MemoryError`` where the device has not so much.
    """

    def __init__(self, device: ComputeDevice, slot_bytes: int, num_slots: int) -> None:
        self._device = device
        self._slot_bytes = slot_bytes
        self.nbytes = slot_bytes * num_slots
        self.pace = Pace(0.0)
        self._block = device.memory(self.nbytes)
        self._free = deque(
            device.tensor(self._block, number * slot_bytes, slot_bytes, torch.uint8, None)
            for number in range(num_slots)
        )
        self._under_way: list[Visit] = []
        self._is_off = False

    def measure(self, host: torch.Tensor) -> None:
        """How fast the link is, by copies of ``host`` (flat bytes, registered) while nothing else
        is on its way. Raises what the device raises.
        """
        slot, seconds = self._free[0][: host.numel()], []
        for _ in range(_MEASUREMENTS):
            began = time.monotonic()
            for stream, target, source in ((Stream.UP, slot, host), (Stream.BACK, host, slot)):
                self._device.copy(stream, target, source)
                self._device.record(stream).wait()
            seconds.append(time.monotonic() - began)
        self.pace = Pace(min(seconds) / 2 / max(1, slot.numel()))

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
        visit = Visit(self._device, elements, self._free.popleft())
        self.pace.went_there(elements)
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
        _all_done(self._device)
        self._free.clear()
        self._under_way.clear()
        self._block = None

    def _end(self, visit: Visit) -> None:
        self._under_way.remove(visit)
        if visit.lost_by is not None:
            self.turn_off(visit.lost_by)
            return
        self._free.append(visit.slot)


def _all_done(device: ComputeDevice) -> Event:
    """Wait until no stream is at any visit; the last moment of these."""
    for stream in _USED:
        last = device.record(stream)
        last.wait()
    return last


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
