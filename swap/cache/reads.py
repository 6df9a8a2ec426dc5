"""Reads of weights from where they live into the arena."""

from __future__ import annotations

from swap.cache.arena import Arena, Entry
from swap.plan.layout import PIECE, Segment
from swap.storage.components import ComponentStore, as_bytes
from swap.timeline import Timeline


class WeightReads:
    """Starts them; who needs the weights waits for the operations of the entry."""

    def __init__(self, components: ComponentStore, arena: Arena, timeline: Timeline) -> None:
        self._components = components
        self._arena = arena
        self._timeline = timeline

    def need_landing(self, parameter: int) -> bool:
        """Whether a part of ``parameter`` is read from NVMe."""
        segments = self._components.layout.segments_of[parameter]
        return not all(self._components.is_array(segment.subgroup) for segment in segments)

    def start(self, entry: Entry) -> None:
        """Bring all values of an entry that is empty into it; those in HOST are there on return."""
        for segment in self._components.layout.segments_of[entry.spec.index]:
            if self._components.is_array(segment.subgroup):
                home = self._components.arrays.of(segment.subgroup, "weight")
                values = home[segment.offset : segment.offset + segment.length]
                self._arena.fill(entry, segment.start, values)
            else:
                self._read(entry, segment)
        if not entry.is_reading:
            self._arena.arrived(entry)

    def _read(self, entry: Entry, segment: Segment) -> None:
        """Whole pages: the entry is padded like the component."""
        assert entry.landing is not None
        extent = self._components.extent(segment.subgroup, "weight")
        assert extent is not None
        length = -(-segment.length // PIECE) * PIECE
        part = entry.landing[segment.start : segment.start + length]
        entry.landed.append((segment.start, segment.length))
        start = segment.offset * part.dtype.itemsize
        urgent = not entry.is_ahead
        operation = self._components.nvme.read(extent, start, as_bytes(part), urgent=urgent)
        entry.operations.append(self._timeline.watch(operation, entry.spec.name, purpose="weights"))
