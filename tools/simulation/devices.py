"""A device whose copies and computing take time, over memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from aio import Slab
from simulation.hardware import Hardware, Moment, Queue, Resource
from swap.device.interface import Stream

_DOWNWARDS = (Stream.DOWN, Stream.BACK)


class SimulatedDevice:
    """See ``swap.device.interface.ComputeDevice``. One link each way; bytes count ``scale`` times.

    Threads run ahead of it: what they ask it to ``compute`` is done when its streams come to that.
    """

    def __init__(self, hardware: Hardware, link: float, scale: int) -> None:
        self.torch_device = torch.device("cpu")
        self._scale = scale
        self._up, self._down = hardware.resource("up", link), hardware.resource("down", link)
        self._computing = hardware.resource("device", 1.0)
        self._queues = {stream: Queue(hardware) for stream in Stream}

    @property
    def links(self) -> tuple[Resource, Resource]:
        return self._up, self._down

    def compute(self, seconds: float) -> None:
        self._queues[Stream.COMPUTE].work(self._computing, seconds)

    def update(self, seconds: float) -> None:
        """As ``compute``, beside it: the two take turns on the device."""
        self._queues[Stream.UPDATE].work(self._computing, seconds)

    def record(self, stream: Stream) -> Moment:
        return self._queues[stream].record()

    def wait_for(self, stream: Stream, event: Any) -> None:
        self._queues[stream].wait_for(event)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        link = self._down if stream in _DOWNWARDS else self._up
        nbytes = source.numel() * source.element_size()
        self._queues[stream].work(link, nbytes * self._scale)

    def uses(self, stream: Stream, tensor: torch.Tensor, *, writes: bool = False) -> None:
        """All that is computed is computed on one stream."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self, nbytes: int) -> Any:
        return np.zeros(nbytes, dtype=np.uint8)

    def tensor(
        self, memory: Any, offset: int, numel: int, dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        shown = _Shown(memory, offset, numel * dtype.itemsize, owner)
        return torch.from_numpy(np.asarray(shown)).view(dtype)

    def register(self, slab: Slab) -> Callable[[], None]:
        return lambda: None


class _Shown:
    """What numpy sees as the memory of a range."""

    def __init__(self, memory: Any, offset: int, nbytes: int, owner: object) -> None:
        self._kept = memory, owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (memory.ctypes.data + offset, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
