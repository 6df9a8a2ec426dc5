"""A CUDA device: the primitives of ``interface`` by streams and events of torch.

Every call names its device: threads of ours have whatever current device torch gave them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from aio import Slab
from swap.device.interface import Stream

_PORTABLE = 1
"""Registered host memory is known to all devices."""


class CudaEvent:
    """A moment in one stream, or in all streams that compute."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        self.events = [torch.cuda.Event(blocking=True) for _ in streams]
        for event, stream in zip(self.events, streams, strict=True):
            event.record(stream)

    def done(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


class CudaDevice:
    """See ``ComputeDevice``."""

    def __init__(self, device: torch.device) -> None:
        if device == torch.device(device.type):
            raise ValueError(f"{device} is no single device; name one, such as {device}:0")
        self.torch_device = device
        own = (Stream.UP, Stream.DOWN, Stream.BACK, Stream.UPDATE)
        self._streams = {stream: torch.cuda.Stream(device) for stream in own}
        self._computing: dict[int, torch.cuda.Stream] = {}
        """By handle: what weights were computed with on."""

    def record(self, stream: Stream) -> CudaEvent:
        return CudaEvent(self._all_of(stream))

    def wait_for(self, stream: Stream, event: Any) -> None:
        waiting = self._stream(stream)
        for one in event.events:
            waiting.wait_event(one)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def uses(self, stream: Stream, tensor: torch.Tensor, *, writes: bool = False) -> None:
        if stream is Stream.COMPUTE and tensor.numel():
            current = self._stream(stream)
            self._computing.setdefault(current.cuda_stream, current)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream(stream))

    def memory(self, nbytes: int) -> torch.Tensor:
        # From the pool of a stream that computes nothing: what comes back to it is used by us.
        try:
            with self.on(Stream.UP):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(
                f"{self.torch_device} has no {nbytes} bytes in one piece: {error}"
            ) from error

    def tensor(
        self, memory: torch.Tensor, offset: int, numel: int, dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.torch_device)
        shown = _Shown(memory, offset, numel * dtype.itemsize, owner)
        return torch.as_tensor(shown, device=self.torch_device).view(dtype)

    def register(self, slab: Slab) -> Callable[[], None]:
        runtime = torch.cuda.cudart()
        address = slab.address
        with torch.cuda.device(self.torch_device):
            code = runtime.cudaHostRegister(address, slab.nbytes, _PORTABLE)
        if int(code) != 0:
            raise RuntimeError(
                f"cannot register {slab.nbytes} bytes of host memory with CUDA (error {int(code)});"
                " give less host_memory, or raise the limit on locked memory"
            )

        def undo() -> None:
            for stream in self._streams:
                self.record(stream).wait()
            runtime.cudaHostUnregister(address)

        return undo

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            return torch.cuda.current_stream(self.torch_device)
        return self._streams[stream]

    def _all_of(self, stream: Stream) -> list[torch.cuda.Stream]:
        current = self._stream(stream)
        if stream is not Stream.COMPUTE:
            return [current]
        return [*({current.cuda_stream: current} | self._computing.copy()).values()]


class _Shown:
    """What torch sees as the memory of one range, and refers to as long as a view of it is left."""

    def __init__(self, memory: torch.Tensor, offset: int, nbytes: int, owner: object) -> None:
        self._kept = memory, owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 2,
            "data": (memory.data_ptr() + offset, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
