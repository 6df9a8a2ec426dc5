"""One rank's hardware in simulated time: what the replay asks to compute, to move and to keep.

The disk has the three lanes of ``swap.storage.extents``: reads on demand, reads ahead (for updates
and for weights along the schedule), writes. Each lane does one request after the other; lanes
share the disk. Transfers between ranks are one lane, too.
"""

from __future__ import annotations

from simulator.clock import Clock, Lane, Process, Shared, Signal
from simulator.rates import UNLIMITED, Rates
from swap.timeline import Timeline


class Machine:
    """Everything that takes time. What happens is noted in ``timeline``."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.clock = Clock()
        self.timeline = Timeline()
        self.disk = Shared(
            self.clock,
            {"read": rates.ssd_read, "write": rates.ssd_write},
            together=rates.ssd_together,
        )
        self._demand, self._ahead, self._writes = (Lane(self.clock) for _ in range(3))
        self._saves = Lane(self.clock)
        self._ranks = Lane(self.clock)
        jobs = {"kernel": rates.adam, "gradients": rates.gradients, "moving": rates.ssd_host}
        if rates.computes_on_host:
            jobs["compute"] = 1.0
        self._cores = Shared(
            self.clock,
            jobs,
            together=1.0,
            weights={kind: 1.0 / speed for kind, speed in jobs.items()},
        )
        self._device = self._cores
        if not rates.computes_on_host:
            self._device = Shared(self.clock, {"compute": 1.0})
        links = {"up": rates.to_device, "down": rates.from_device}
        self._link = Shared(self.clock, links)
        self._network = Shared(self.clock, {"received": rates.network})

    # Computing. Each of these is a process that ends when the work is done.

    def compute(self, phase: str, seconds: float) -> Process:
        yield from self._noted(phase, self._device.use("compute", seconds))

    def kernel(self, elements: int, label: str = "") -> Process:
        yield from self._noted("kernel", self._cores.use("kernel", elements), label=label)

    def store(self, nbytes: int) -> Process:
        """Store a gradient in host memory and take its sum of squares."""
        yield self._cores.use("gradients", nbytes)

    # Moving. These start at once; the signal is set when the bytes have arrived.

    def read(self, nbytes: int, *, urgent: bool, purpose: str, label: str = "") -> Signal:
        lane = self._demand if urgent else self._ahead
        return lane.submit(self._transfer("read", nbytes, purpose, label))

    def write(self, nbytes: int, *, purpose: str, label: str = "") -> Signal:
        return self._writes.submit(self._transfer("write", nbytes, purpose, label))

    def save(self, nbytes: int, from_disk: int) -> Signal:
        """Write a part of a checkpoint, of which some bytes are read from the disk before."""
        return self._saves.submit(self._saving(nbytes, from_disk))

    def up(self, nbytes: int) -> Signal:
        """To the device."""
        return self._copy("up", nbytes)

    def down(self, nbytes: int) -> Signal:
        """From the device."""
        return self._copy("down", nbytes)

    def receive(self, nbytes: int) -> Signal:
        """A transfer between all ranks, in which this one receives so much."""
        return self._ranks.submit(self._receiving(nbytes))

    @property
    def received_bytes(self) -> float:
        """From other ranks."""
        return self._network.done["received"]

    def _copy(self, kind: str, nbytes: int) -> Signal:
        if self._speed(kind) == UNLIMITED:
            return self._link.use(kind, nbytes)
        return self.clock.start(self._noted("copy", self._link.use(kind, nbytes), nbytes=nbytes))

    def _speed(self, kind: str) -> float:
        return self.rates.to_device if kind == "up" else self.rates.from_device

    def _transfer(self, kind: str, nbytes: int, purpose: str, label: str) -> Process:
        signals = (self.disk.use(kind, nbytes), self._cores.use("moving", nbytes))
        start = self.clock.now
        yield from signals
        stop = self.clock.now
        self.timeline.add(kind, start, stop, nbytes=nbytes, label=label, purpose=purpose)

    def _saving(self, nbytes: int, from_disk: int) -> Process:
        if from_disk:
            yield self.disk.use("read", from_disk)
        yield self.disk.use("write", nbytes)

    def _receiving(self, nbytes: int) -> Process:
        if self.rates.network_latency_seconds:
            yield self.clock.timer(self.rates.network_latency_seconds)
        yield self._network.use("received", nbytes)

    def _noted(self, kind: str, signal: Signal, *, nbytes: int = 0, label: str = "") -> Process:
        start = self.clock.now
        yield signal
        stop = self.clock.now
        self.timeline.add(kind, start, stop, nbytes=nbytes, label=label)
