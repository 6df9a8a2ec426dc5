"""Steps of training in simulated time: forward and backward along a trace, updates and I/O behind.

``simulate`` is a pure function of a trace, of the homes of its bytes and of rates. What waits for
what follows the implementation, module by module (``weights.py``, ``update.py``, ``gradients.py``,
``gathering.py``). Of a GPU it is assumed that the host runs one op ahead of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from simulator.clock import Process, Signal
from simulator.gathering import Gathering
from simulator.gradients import Gradients
from simulator.homes import Homes
from simulator.machine import Machine
from simulator.rates import Rates
from simulator.trace import Op, Trace
from simulator.update import Update
from simulator.weights import Weights
from swap.plan.layout import Subgroup, neighbours
from swap.tiers import Tier
from swap.update.readiness import Arrivals

_EXCHANGES = 2
"""Gradients on their way between ranks, or from the device, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How steps follow one another. A measurement begins when ``warm_steps`` are done and nothing
    is under way, and ends when the last of ``steps`` is finished to its last write.

    ``passes`` are forward and backward passes before a step. ``is_clipped``: no update begins
    before the norm of all gradients is known. A checkpoint of ``save_bytes`` for each step is
    written behind the next ones, ``save_read_bytes`` of it read from the disk before.
    """

    warm_steps: int = 3
    steps: int = 4
    passes: int = 1
    is_clipped: bool = False
    save_bytes: int = 0
    save_read_bytes: int = 0
    activations: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a step takes, in the mean over those measured. ``seconds_of`` has what each kind of work
    was busy for; ``stall_seconds`` is what computing waited for weights. ``save_seconds`` is how
    long after its step a checkpoint is durable.
    """

    step_seconds: float
    read_bytes: float
    written_bytes: float
    received_bytes: float
    stall_seconds: float
    disk_seconds: float
    kernel_seconds: float
    compute_seconds: float
    save_seconds: float

    @property
    def disk_share(self) -> float:
        """Part of the time in which the disk works."""
        return self.disk_seconds / self.step_seconds


def simulate(trace: Trace, homes: Homes, rates: Rates, pattern: Pattern | None = None) -> StepTimes:
    """Replay steps of ``trace`` on a rank with these ``rates``.

    Raises ``RuntimeError`` if weights cannot be gathered because there is no room for them.
    """
    return _Replay(trace, homes, rates, pattern or Pattern()).run()


class _Replay:
    """The thread that trains, and all that it sets going."""

    def __init__(self, trace: Trace, homes: Homes, rates: Rates, pattern: Pattern) -> None:
        self._trace = trace
        self._rates = rates
        self._pattern = pattern
        self._layout = homes.placement.layout
        self._state_home = homes.placement.state_home
        self._machine = Machine(rates)
        self._weights = Weights(self._machine, homes.placement, homes.arena_bytes)
        self._gradients = Gradients(self._machine, homes.placement)
        self._update = Update(
            self._machine, homes.placement, homes.rule, self._weights, self._gradients
        )
        self._gathering: Gathering | None = None
        if homes.world_size > 1:
            self._gathering = Gathering(
                self._machine,
                self._weights,
                trace.specs,
                homes.is_partitioned,
                world_size=homes.world_size,
                capacity_bytes=homes.capacity_bytes,
            )
        self._is_partitioned = homes.is_partitioned
        self._neighbours = neighbours(self._layout)
        self._arrivals = Arrivals(self._layout)
        self._on_way: deque[tuple[int, Signal]] = deque()
        self._storing: deque[Signal] = deque()
        self._fed: list[Subgroup] = []
        self._waiting: list[Subgroup] = []
        self._is_early = False
        self._activations_back: list[Signal] = []
        self._saves: list[Signal] = []
        self._save_seconds: list[float] = []

    def run(self) -> StepTimes:
        clock = self._machine.clock
        for _ in range(self._pattern.warm_steps):
            clock.run_until(clock.start(self._step()))
        clock.run_until(clock.start(self._flush()))
        started, before = clock.now, self._totals()
        for _ in range(self._pattern.steps):
            clock.run_until(clock.start(self._step()))
        clock.run_until(clock.start(self._flush()))
        after, steps = self._totals(), self._pattern.steps
        return StepTimes(
            step_seconds=(clock.now - started) / steps,
            save_seconds=max(self._save_seconds, default=0.0),
            **{name: (after[name] - value) / steps for name, value in before.items()},
        )

    def _totals(self) -> dict[str, float]:
        machine = self._machine
        seconds = machine.timeline.seconds
        return {
            "read_bytes": machine.disk.done["read"],
            "written_bytes": machine.disk.done["write"],
            "received_bytes": machine.received_bytes,
            "disk_seconds": machine.disk.busy_seconds,
            "stall_seconds": seconds["stall"],
            "kernel_seconds": seconds["kernel"],
            "compute_seconds": seconds["forward"] + seconds["backward"],
        }

    def _step(self) -> Process:
        for _ in range(self._pattern.passes):
            for op in self._trace.ops:
                yield from self._op(op)
        yield from self._collect()
        yield from self._take_step()
        if self._pattern.save_bytes:
            yield from self._save()

    def _flush(self) -> Process:
        yield from self._update.wait()
        yield from self._gradients.settle_all()
        yield from self._saves

    # One op.

    def _op(self, op: Op) -> Process:
        weights = self._gathering or self._weights
        weights.pin(op.uses)
        if self._gathering is None:
            for parameter in op.uses[1:]:
                self._weights.start_early(parameter)
        for parameter in op.uses:
            yield from weights.borrow(parameter)
        if op.phase == "backward" and op.activation_bytes:
            yield from self._activations_arrive(op)
        yield from self._compute(op)
        weights.unpin(op.uses)
        if op.phase == "forward" and op.activation_bytes:
            self._machine.clock.start(self._activations_leave(op.activation_bytes))
        for parameter in op.gradients:
            yield from self._gradient(parameter)

    def _compute(self, op: Op) -> Process:
        seconds = op.seconds + op.flops / self._rates.flops
        work = self._machine.compute(op.phase, seconds)
        if self._gathering is None:
            yield from work
        elif self._rates.computes_on_host:
            yield from self._gathering.start_next()
            yield from work
        else:
            computed = self._machine.clock.start(work)
            yield from self._gathering.start_next()
            yield computed

    def _activations_leave(self, nbytes: int) -> Process:
        if self._pattern.activations is not Tier.DEVICE:
            yield self._machine.down(nbytes)
        if self._pattern.activations is Tier.NVME:
            yield self._machine.write(nbytes, purpose="activations")

    def _activations_arrive(self, op: Op) -> Process:
        """They are fetched one block ahead, so what is waited for was asked for a block before."""
        before, self._activations_back = self._activations_back, []
        self._activations_back = [
            self._machine.clock.start(self._activations_fetched(op.activation_bytes))
        ]
        yield from before

    def _activations_fetched(self, nbytes: int) -> Process:
        if self._pattern.activations is Tier.NVME:
            yield self._machine.read(nbytes, urgent=False, purpose="activations")
        if self._pattern.activations is not Tier.DEVICE:
            yield self._machine.up(nbytes)

    # A gradient: from other ranks, from the device, into its home; then perhaps an early update.

    def _gradient(self, parameter: int) -> Process:
        if self._gathering is None or not self._is_partitioned[parameter]:
            yield from self._from_device(parameter)
            return
        while len(self._on_way) >= _EXCHANGES:
            yield from self._finish_exchange()
        self._on_way.append((parameter, self._gathering.reduce(parameter)))

    def _finish_exchange(self) -> Process:
        parameter, arrived = self._on_way.popleft()
        yield arrived
        yield from self._from_device(parameter)

    def _from_device(self, parameter: int) -> Process:
        for other in self._neighbours[parameter]:
            yield from self._weights.wait_until_updated(other)
        self._arrivals.sent(parameter)
        if self._rates.computes_on_host:
            yield from self._store(parameter)
            return
        while len(self._storing) >= _EXCHANGES:
            yield self._storing.popleft()
        self._storing.append(self._machine.clock.start(self._down_and_store(parameter)))

    def _down_and_store(self, parameter: int) -> Process:
        yield self._machine.down(self._layout.specs[parameter].weight_bytes)
        yield from self._store(parameter)

    def _store(self, parameter: int) -> Process:
        yield from self._gradients.add(parameter)
        found = self._arrivals.arrived(parameter)
        if self._pattern.is_clipped:
            return
        self._waiting += [group for group in found if self._can_be_early(group)]
        if not self._waiting:
            return
        if not self._is_early:
            if not self._update.is_idle:
                return
            self._is_early = True
            self._update.begin_early()
        self._update.feed(self._waiting)
        self._fed += self._waiting
        self._waiting = []

    def _can_be_early(self, group: Subgroup) -> bool:
        on_nvme = not group.resident and self._state_home[group.index] is Tier.NVME
        return on_nvme and self._arrivals.is_predictable

    def _collect(self) -> Process:
        while self._on_way:
            yield from self._finish_exchange()
        yield from self._storing
        self._storing.clear()

    # The step.

    def _take_step(self) -> Process:
        if not self._is_early:
            yield from self._update.wait()
        self._arrivals.end_step()
        self._gradients.captured()
        self._weights.schedule.end_cycle()
        if self._gathering is not None:
            self._gathering.end_step()
        trained = [group for group in self._layout.subgroups if group.trainable]
        yield from self._update.update_now([group for group in trained if group.resident])
        moving = [group for group in trained if not group.resident]
        if self._is_early:
            done = {group.index for group in self._fed}
            rest = [group for group in moving if group.index not in done]
            self._update.confirm(self._fed, rest)
        elif moving:
            self._update.submit(moving)
        self._is_early, self._fed, self._waiting = False, [], []
        self._activations_back = []

    def _save(self) -> Process:
        """The last save must be durable; the update is brought home, then it goes on behind."""
        yield from self._saves
        yield from self._update.wait()
        self._saves = [self._machine.clock.start(self._saved(self._machine.clock.now))]

    def _saved(self, since: float) -> Process:
        parts = 64
        for _ in range(parts):
            yield self._machine.save(
                self._pattern.save_bytes // parts, self._pattern.save_read_bytes // parts
            )
        self._save_seconds.append(self._machine.clock.now - since)
