"""Training on a simulated device that updates what is at home in host memory, and may fail."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from swap.device.interface import Stream
from swap.plan.layout import PIECE, pack
from swap.update.stages import Step
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import TieredRig, add_to_both, fill_both, placement_of, specs_of

SIZES = (PIECE, 5 * PIECE + 7, 2 * PIECE, PIECE + 1, 3, 2 * PIECE)
ALL = range(len(SIZES))


def made(
    stack: ExitStack,
    folder: Path,
    device: SimulatedDevice,
    *,
    dtype: torch.dtype = torch.bfloat16,
    is_speculative: bool = True,
) -> TieredRig:
    placement = placement_of(
        pack(specs_of(SIZES, dtype), 2 * PIECE),
        arena_bytes=0,
        inbox_bytes=12 * PIECE * 4,
        device_bytes=16 * PIECE * 4,
        state_on_nvme=lambda _: False,
        gradient_on_nvme=lambda _: False,
        spared=lambda group: group != 1,
    )
    rig = TieredRig(stack, folder, placement, device=device)
    fill_both(rig.state, rig.plain)
    if is_speculative:
        rig.state.speculation.expect_step = lambda: Step(
            updates=rig.plain.updates(ALL), gradient_scale=1.0
        )
    return rig


def backward(rig: TieredRig, number: int, parameters: Any = ALL) -> None:
    for parameter in reversed(parameters):
        add_to_both(rig.state, rig.plain, parameter, seed=10 * number + parameter)


class Refusing:
    """What visits ask of ``device`` fails, from the ``first`` call of a ``kind`` on, ``times`` in
    all. ``kind``: a copy on a stream, or the wait for its end.
    """

    def __init__(self, device: SimulatedDevice, kind: tuple[str, Stream], first: int, times: int):
        self._device, self._kind = device, kind
        self._fails = range(first, first + times)
        self.num_calls = 0
        self.has_failed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def count(self, *kind: Any) -> None:
        if kind == self._kind:
            self.num_calls += 1
            if self.num_calls in self._fails:
                self.has_failed.set()
                raise RuntimeError("the device failed")

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self.count("copy", stream)
        self._device.copy(stream, target, source)

    def record(self, stream: Stream) -> Any:
        return End(self, self._device.record(stream))

    def wait_for(self, stream: Stream, event: Any) -> None:
        self._device.wait_for(stream, event.event)


class End:
    def __init__(self, device: Refusing, event: Any) -> None:
        self._device, self.event = device, event

    def done(self) -> bool:
        self._device.count("ask", self.event.stream)
        return bool(self.event.done())

    def wait(self) -> None:
        self._device.count("wait", self.event.stream)
        self.event.wait()
