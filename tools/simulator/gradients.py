"""Gradients on their way to host memory or to the disk in simulated time; follows
``swap.gradients.store`` and ``swap.gradients.spill``: four chunks of a spill are under way at once.
"""

from __future__ import annotations

from collections import defaultdict, deque

from simulator.clock import Process, Signal
from simulator.machine import Machine
from swap.plan.layout import PIECE, Segment, Subgroup
from swap.plan.placement import SPILL_CHUNKS, Placement, gradient_bytes
from swap.tiers import Tier


class Gradients:
    """Where gradients are, and what storing one takes."""

    def __init__(self, machine: Machine, placement: Placement) -> None:
        self._machine = machine
        self._layout = placement.layout
        self._chunk_bytes = placement.spill_chunk_bytes
        self._on_nvme = [
            home is Tier.NVME and group.trainable
            for group, home in zip(placement.layout.subgroups, placement.gradient_home, strict=True)
        ]
        self._present: set[int] = set()
        self._chunks: deque[Signal] = deque()
        self._writes: defaultdict[int, list[Signal]] = defaultdict(list)

    def is_spilled(self, group: Subgroup) -> bool:
        return self._on_nvme[group.index]

    def nbytes(self, group: Subgroup) -> int:
        return gradient_bytes(group)

    def add(self, parameter: int) -> Process:
        """Store a gradient, or add it to the one that is there."""
        for segment in self._layout.segments_of[parameter]:
            itemsize = self._layout.specs[parameter].dtype.itemsize
            if self._on_nvme[segment.subgroup]:
                yield from self._spill(segment, itemsize, parameter in self._present)
            else:
                yield from self._machine.store(segment.length * itemsize)
        self._present.add(parameter)

    def captured(self) -> None:
        """A step was taken: the next gradients are new ones."""
        self._present.clear()

    def release(self, group: Subgroup) -> None:
        self._writes.pop(group.index, None)

    def settle(self, group: Subgroup) -> Process:
        """Wait until what was spilled of ``group`` is on the disk."""
        yield from self._writes.pop(group.index, [])

    def settle_all(self) -> Process:
        for index in list(self._writes):
            yield from self._writes.pop(index)

    def _spill(self, segment: Segment, itemsize: int, accumulate: bool) -> Process:
        if accumulate:
            yield from self._writes.pop(segment.subgroup, [])
        left = -(-segment.length // PIECE) * PIECE * itemsize
        while left > 0:
            nbytes = min(left, self._chunk_bytes)
            left -= nbytes
            while len(self._chunks) >= SPILL_CHUNKS:
                yield self._chunks.popleft()
            if accumulate:
                yield self._machine.read(nbytes, urgent=False, purpose="gradients")
            yield from self._machine.store(nbytes)
            write = self._machine.write(nbytes, purpose="gradients")
            self._chunks.append(write)
            self._writes[segment.subgroup].append(write)
