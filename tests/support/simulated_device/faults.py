"""Devices that leave one thing out which has to be done, as a fault in our code would."""

from collections.abc import Callable
from typing import Any

import torch

from aio import Slab
from swap.device.interface import Stream
from tests.support.simulated_device.device import SimulatedDevice
from tests.support.simulated_device.order import SimulatedEvent


class WithoutWaits(SimulatedDevice):
    """``waiting`` does not wait for events of ``awaited``."""

    waiting: Stream
    awaited: Stream

    def wait_for(self, stream: Stream, event: Any) -> None:
        if (stream, event.stream) != (self.waiting, self.awaited):
            super().wait_for(stream, event)


class NoWaitBeforeCompute(WithoutWaits):
    """Weights are computed with before they have come."""

    waiting, awaited = Stream.COMPUTE, Stream.UP


class ReusedBeforeComputed(WithoutWaits):
    """Weights are copied over others that are still computed with."""

    waiting, awaited = Stream.UP, Stream.COMPUTE


class ReusedBeforeReadBack(WithoutWaits):
    """Weights are copied over others that the update still reads."""

    waiting, awaited = Stream.UP, Stream.BACK


class GradientBeforeComputed(WithoutWaits):
    """A gradient is copied while it is computed."""

    waiting, awaited = Stream.DOWN, Stream.COMPUTE


class ReadBackBeforeCome(WithoutWaits):
    """The update takes weights from the device before they have come there."""

    waiting, awaited = Stream.BACK, Stream.UP


class LandingReleasedEarly(SimulatedDevice):
    """What lands is taken for copied as soon as its copy is started."""

    def is_done(self, event: SimulatedEvent) -> bool:
        return event.stream is Stream.UP or super().is_done(event)


class SlotReusedEarly(SimulatedDevice):
    """Nobody waits until new weights have left their staging slot. (Where all weights fit, nothing
    lands any more once there are gradients.)
    """

    _is_trained = False

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._is_trained |= stream is Stream.DOWN
        super().copy(stream, target, source)

    def is_done(self, event: SimulatedEvent) -> bool:
        is_new = self._is_trained and event.stream is Stream.UP
        return is_new or super().is_done(event)

    def wait(self, event: SimulatedEvent) -> None:
        if not self.is_done(event):
            super().wait(event)


class GradientTakenEarly(SimulatedDevice):
    """A gradient is stored before it has come."""

    def wait(self, event: SimulatedEvent) -> None:
        if event.stream is not Stream.DOWN:
            super().wait(event)


class Unregistered(SimulatedDevice):
    """Host memory is not registered."""

    def register(self, slab: Slab) -> Callable[[], None]:
        return lambda: None
