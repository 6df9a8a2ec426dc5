"""Whole weights that are gathered from all ranks, in simulated time; follows
``infinity.ranks.gathered_weights``. All ranks do the same at the same time, so one stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from simulator.clock import Process, Signal
from simulator.machine import Machine
from simulator.weights import Weights
from swap.plan.layout import ParameterSpec
from swap.plan.schedule import Schedule


@dataclass(slots=True, eq=False)
class _Gathered:
    nbytes: int
    arrived: Signal


class Gathering:
    """``wholes`` are the parameters, ``is_partitioned`` tells which of them are cut."""

    def __init__(
        self,
        machine: Machine,
        slices: Weights,
        wholes: Sequence[ParameterSpec],
        is_partitioned: Sequence[bool],
        *,
        world_size: int,
        capacity_bytes: int,
    ) -> None:
        self._machine = machine
        self._slices = slices
        self._wholes = wholes
        self._is_partitioned = is_partitioned
        self._others = (world_size - 1) / world_size
        self._capacity_bytes = capacity_bytes
        self._schedule = Schedule()
        self._entries: dict[int, _Gathered] = {}
        self._pins: Counter[int] = Counter()
        self._used_bytes = 0

    def pin(self, parameters: Sequence[int]) -> None:
        self._pins.update(parameters)
        self._slices.pin(p for p in parameters if not self._is_partitioned[p])

    def unpin(self, parameters: Sequence[int]) -> None:
        for parameter in parameters:
            self._pins[parameter] -= 1
            if self._pins[parameter] <= 0:
                del self._pins[parameter]
        self._slices.unpin(p for p in parameters if not self._is_partitioned[p])

    def borrow(self, parameter: int) -> Process:
        """Wait for the whole weights; raises ``RuntimeError`` where there is no room for them."""
        if not self._is_partitioned[parameter]:
            yield from self._slices.borrow(parameter)
            return
        self._schedule.record(parameter)
        entry = self._entries.get(parameter)
        if entry is None:
            if not self._make_room(self._wholes[parameter].weight_bytes, sooner_than=None):
                raise RuntimeError(f"no room to gather {self._wholes[parameter].name}")
            entry = yield from self._start(parameter)
        start = self._machine.clock.now
        yield entry.arrived
        if self._machine.clock.now > start:
            name = self._wholes[parameter].name
            self._machine.timeline.add("stall", start, self._machine.clock.now, label=name)

    def start_next(self) -> Process:
        """Start gathering what comes next, which waits for this rank's slice of it."""
        if self._schedule.is_at_start:
            return
        for parameter in self._schedule.upcoming():
            distance = self._schedule.distance(parameter)
            nbytes = self._wholes[parameter].weight_bytes
            if parameter not in self._entries and self._make_room(nbytes, sooner_than=distance):
                yield from self._start(parameter)
            return

    def reduce(self, parameter: int) -> Signal:
        """Send a gradient's slices to the other ranks and receive theirs."""
        nbytes = self._wholes[parameter].weight_bytes
        return self._machine.receive(int(nbytes * self._others))

    def end_step(self) -> None:
        """All weights were updated."""
        self._schedule.end_cycle()
        for parameter in list(self._entries):
            self._forget(parameter)

    def _start(self, parameter: int) -> Generator[Signal, None, _Gathered]:
        yield from self._slices.borrow(parameter)
        nbytes = self._wholes[parameter].weight_bytes
        entry = _Gathered(nbytes, self._machine.receive(int(nbytes * self._others)))
        self._entries[parameter] = entry
        self._used_bytes += nbytes
        return entry

    def _make_room(self, nbytes: int, *, sooner_than: int | None) -> bool:
        while self._used_bytes + nbytes > self._capacity_bytes:
            idle = [index for index in self._entries if index not in self._pins]
            victim = max(idle, key=lambda i: (self._schedule.distance(i), i), default=None)
            if victim is None:
                return False
            if sooner_than is not None and self._schedule.distance(victim) <= sooner_than:
                return False
            self._forget(victim)
        return True

    def _forget(self, parameter: int) -> None:
        self._used_bytes -= self._entries.pop(parameter).nbytes
