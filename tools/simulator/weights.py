"""The weights that are resident in simulated time; follows ``swap.cache.weight_cache`` and
``swap.cache.eviction`` step by step, with bytes in place of buffers.

Its schedule is the real one, so what is evicted and what is read ahead is decided by the same code.
What it leaves out: fragmentation of the arena, and tensors that autograd holds beyond their use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

from simulator.clock import Process, Signal
from simulator.machine import Machine
from swap.cache.weight_cache import _LOOKS_PER_ARENA
from swap.plan.layout import PIECE, Segment
from swap.plan.placement import Placement
from swap.plan.schedule import Schedule
from swap.tiers import Tier


@dataclass(slots=True, eq=False)
class Entry:
    """Weights in the arena. ``missing``: parts that an update has still to deliver."""

    parameter: int
    nbytes: int
    arrived: Signal
    missing: set[int] = field(default_factory=set)


class Weights:
    """Who is in the arena, and what is read when."""

    def __init__(self, machine: Machine, placement: Placement, arena_bytes: int) -> None:
        self.schedule = Schedule()
        self._machine = machine
        self._layout = placement.layout
        self._state_home = placement.state_home
        self._arena_bytes = arena_bytes
        self._used_bytes = 0
        self._looked_bytes = 0
        self._entries: dict[int, Entry] = {}
        self._stale: dict[int, Entry] = {}
        self._pins: Counter[int] = Counter()
        self._pending: dict[int, set[int]] = {}
        self._changed = Signal(machine.clock)
        self._at_home = [self._is_at_home(p) for p in range(len(self._layout.specs))]

    # What computing asks for.

    def pin(self, parameters: Iterable[int]) -> None:
        self._pins.update(parameters)

    def unpin(self, parameters: Iterable[int]) -> None:
        for parameter in parameters:
            self._pins[parameter] -= 1
            if self._pins[parameter] <= 0:
                del self._pins[parameter]

    def start_early(self, parameter: int) -> None:
        """Start reading what the same module asks for next."""
        if self._is_absent(parameter):
            self._start_read(parameter, sooner_than=self.schedule.distance(parameter))

    def borrow(self, parameter: int) -> Process:
        """Wait until the weights can be computed with; start reading what comes later."""
        self.schedule.record(parameter)
        if self._at_home[parameter]:
            yield from self.wait_until_updated(parameter)
            return
        start = self._machine.clock.now
        entry = yield from self._fetch(parameter)
        yield entry.arrived
        if self._machine.clock.now > start:
            label = self._layout.specs[parameter].name
            self._machine.timeline.add("stall", start, self._machine.clock.now, label=label)
        self._prefetch_ahead(self._layout.specs[parameter].weight_bytes)

    def wait_until_updated(self, parameter: int) -> Process:
        start = self._machine.clock.now
        while parameter in self._pending:
            yield self._changed
        if self._machine.clock.now > start:
            label = self._layout.specs[parameter].name
            self._machine.timeline.add("stall", start, self._machine.clock.now, label=label)

    # What the update does.

    def begin_update(self, subgroups_of: Mapping[int, tuple[int, ...]]) -> None:
        for parameter, subgroups in subgroups_of.items():
            self._pending[parameter] = set(subgroups)
            entry = self._entries.pop(parameter, None)
            if entry is None:
                continue
            if entry.missing:
                self._used_bytes -= entry.nbytes
            else:
                self._stale[parameter] = entry

    def old(self, segment: Segment) -> Entry | None:
        """The entry from which the update takes old weights of ``segment``, if there is one."""
        entry = self._stale.get(segment.parameter)
        if entry is None and segment.parameter not in self._pending:
            entry = self._entries.get(segment.parameter)
        return None if entry is None or entry.missing else entry

    def took_old(self, segment: Segment) -> None:
        spec = self._layout.specs[segment.parameter]
        if segment.start + segment.length == spec.numel:
            self._forget(self._stale, segment.parameter)

    def offer(self, segment: Segment) -> None:
        """New weights of ``segment``: kept if there is room that nobody needs sooner."""
        if self._at_home[segment.parameter]:
            return
        entry = self._entries.get(segment.parameter)
        if entry is None and segment.start == 0:
            entry = self._open_for_refresh(segment.parameter)
        if entry is None or segment.subgroup not in entry.missing:
            return
        entry.missing.discard(segment.subgroup)
        if not entry.missing:
            self._send_up(entry)
        self._notify()

    def published(self, parameter: int, subgroup: int) -> None:
        pending = self._pending.get(parameter)
        if pending is None:
            return
        pending.discard(subgroup)
        if not pending:
            del self._pending[parameter]
            self._forget(self._stale, parameter)
            entry = self._entries.get(parameter)
            if entry is not None and entry.missing:
                self._forget(self._entries, parameter)
        self._notify()

    # How they get into the arena.

    def _fetch(self, parameter: int) -> Generator[Signal, None, Entry]:
        while True:
            entry = self._entries.get(parameter)
            if entry is not None and not entry.missing:
                return entry
            if parameter not in self._pending:
                entry = self._start_read(parameter, sooner_than=None)
                if entry is not None:
                    return entry
            yield self._changed

    def _prefetch_ahead(self, used_bytes: int) -> None:
        if not self.schedule.plan:
            return
        self._looked_bytes += used_bytes
        if self._looked_bytes < self._arena_bytes // _LOOKS_PER_ARENA:
            return
        self._looked_bytes = ahead_bytes = 0
        for parameter in self.schedule.upcoming():
            ahead_bytes += self._layout.specs[parameter].weight_bytes
            if ahead_bytes > self._arena_bytes:
                return
            if self._is_absent(parameter):
                distance = self.schedule.distance(parameter)
                if self._start_read(parameter, sooner_than=distance) is None:
                    return

    def _is_at_home(self, parameter: int) -> bool:
        if not self._machine.rates.computes_on_host:
            return False
        return all(
            self._state_home[index] is Tier.HOST for index in self._layout.subgroups_of(parameter)
        )

    def _is_absent(self, parameter: int) -> bool:
        return not (
            parameter in self._entries or parameter in self._pending or self._at_home[parameter]
        )

    def _start_read(self, parameter: int, *, sooner_than: int | None) -> Entry | None:
        entry = self._make_room(parameter, sooner_than)
        if entry is None:
            return None
        spec = self._layout.specs[parameter]
        reads = [
            self._machine.read(
                -(-segment.length // PIECE) * PIECE * spec.dtype.itemsize,
                urgent=sooner_than is None,
                purpose="weights",
                label=spec.name,
            )
            for segment in self._layout.segments_of[parameter]
            if self._state_home[segment.subgroup] is Tier.NVME
        ]
        self._machine.clock.start(self._arrive(entry, reads))
        return entry

    def _arrive(self, entry: Entry, reads: list[Signal]) -> Process:
        yield from reads
        yield self._machine.up(entry.nbytes)
        entry.arrived.set()

    def _send_up(self, entry: Entry) -> None:
        self._machine.clock.start(self._arrive(entry, []))

    def _open_for_refresh(self, parameter: int) -> Entry | None:
        parts = set(self._layout.subgroups_of(parameter))
        if self._pending.get(parameter) != parts:
            return None
        entry = self._make_room(parameter, self.schedule.distance(parameter))
        if entry is not None:
            entry.missing = parts
        return entry

    def _make_room(self, parameter: int, sooner_than: int | None) -> Entry | None:
        spec = self._layout.specs[parameter]
        nbytes = spec.padded_numel * spec.dtype.itemsize
        while self._used_bytes + nbytes > self._arena_bytes:
            if not self._evict_one(sooner_than):
                return None
        entry = Entry(parameter, nbytes, Signal(self._machine.clock))
        self._used_bytes += nbytes
        self._entries[parameter] = entry
        return entry

    def _evict_one(self, sooner_than: int | None) -> bool:
        victim, holder = None, self._entries
        farthest = -1 if sooner_than is None else sooner_than
        for entries in (self._entries, self._stale):
            for parameter, entry in entries.items():
                if entries is self._entries and parameter in self._pins:
                    continue
                if sooner_than is not None and (entry.missing or not entry.arrived.is_set):
                    continue
                distance = self.schedule.distance(parameter)
                if distance > farthest:
                    victim, holder, farthest = entry, entries, distance
        if victim is None:
            return False
        self._forget(holder, victim.parameter)
        return True

    def _forget(self, entries: dict[int, Entry], parameter: int) -> None:
        entry = entries.pop(parameter, None)
        if entry is not None:
            self._used_bytes -= entry.nbytes

    def _notify(self) -> None:
        changed, self._changed = self._changed, Signal(self._machine.clock)
        changed.set()
