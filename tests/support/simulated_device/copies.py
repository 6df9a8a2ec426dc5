"""Copies that were asked of a simulated device, and the queues in which they are."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from swap.device.interface import Stream
from tests.support.simulated_device.memory import Range, Storage
from tests.support.simulated_device.order import Region, SimulatedEvent


@dataclass(frozen=True, slots=True)
class End:
    """One end of a copy: bytes of a region."""

    region: Range | Storage
    start: int
    stop: int

    @property
    def reach(self) -> tuple[int, int]:
        return self.start, self.stop

    def touches(self, other: End) -> bool:
        is_same = self.region is other.region
        if isinstance(self.region, Range) and isinstance(other.region, Range):
            is_same = self.region.block is other.region.block
        return is_same and self._first < other._last and other._first < self._last

    @property
    def _first(self) -> int:
        return self.start + (self.region.offset if isinstance(self.region, Range) else 0)

    @property
    def _last(self) -> int:
        return self._first + self.stop - self.start

    def bytes(self) -> torch.Tensor | None:
        if isinstance(self.region, Range):
            return self.region.bytes[self.start : self.stop]
        return self.region.view(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Copy:
    """``expected`` is what is to be copied, where that is known."""

    target: End
    source: End
    expected: torch.Tensor | None


@dataclass(slots=True)
class Queue:
    items: deque[Copy | SimulatedEvent] = field(default_factory=deque)
    num_given: int = 0
    num_done: int = 0


class Turn(threading.local):
    """What a thread did since it may last have computed: see ``_check_computed``."""

    number = 0
    has_copied = False
    ordered: frozenset[Stream] = frozenset()
    last: Region | None = None
