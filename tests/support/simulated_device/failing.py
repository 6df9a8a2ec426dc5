"""A device that fails at calls that are chosen, and works again later."""

from collections.abc import Callable
from typing import Any

import torch

from swap.device.interface import Stream
from tests.support.simulated_device.device import SimulatedDevice
from tests.support.simulated_device.order import SimulatedEvent


class Failing(SimulatedDevice):
    """Fails as ``fail`` says: at the ``first`` call of a kind for a stream, counted from 1, and
    those behind it, ``times`` in all.
    """

    def __init__(self, *way: Any) -> None:
        super().__init__()
        self.fail(*way or ("", Stream.UP, 0, 0))

    def fail(self, kind: str, stream: Stream, first: int, times: int) -> None:
        self.kind, self.stream, self.calls = kind, stream, range(first, first + times)
        self.num_calls = 0

    def _count(self, kind: str, stream: Stream) -> None:
        if (kind, stream) == (self.kind, self.stream):
            self.num_calls += 1
            if self.num_calls in self.calls:
                raise RuntimeError("the device failed")

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._count("copy", stream)
        super().copy(stream, target, source)

    def wait(self, event: SimulatedEvent) -> None:
        self._count("wait", event.stream)
        super().wait(event)


def succeeds(call: Callable[[], object]) -> bool:
    """False where the device failed."""
    try:
        call()
    except RuntimeError as error:
        if str(error) == "the device failed":
            return False
        raise
    return True
