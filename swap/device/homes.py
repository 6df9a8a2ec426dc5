"""What is at home in the memory of a device: arrays, and values on their way in and out.

Arrays stay where they are. They are updated there, by operations on the stream ``UPDATE`` that come
after all that was computed before, and computed with after their last update. Values come and go
through a *bridge*, a slab of registered host memory, while the caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from aio import Slab
from swap.device.interface import ComputeDevice, Event, Stream
from swap.plan.layout import PAGE

_CHANGING = (Stream.UPDATE, Stream.COMPUTE)
"""What changes arrays; copies to them are over when the host goes on."""


class DeviceHomes:
    """``nbytes`` of device memory, of which arrays are taken one after the other. Thread-safe.

    Raises ``MemoryError`` where the device has not so much.
    """

    def __init__(self, device: ComputeDevice, nbytes: int, bridge: Slab) -> None:
        self.device = device
        self._block = device.memory(nbytes)
        self._nbytes = nbytes
        self._used_bytes = 0
        whole = bridge.allocate(bridge.nbytes)
        self._bridge = torch.from_numpy(whole)
        self._updated: dict[int, Event] = {}
        self._lock = threading.Lock()  # guards the bridge

    @property
    def nbytes(self) -> int:
        """Of device memory, all of it taken from the beginning."""
        return self._nbytes

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An array of zeros, from a page on, which is there as long as this object is."""
        nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        assert self._used_bytes + nbytes <= self._nbytes, "what is at home was planned for"
        array = self.device.tensor(self._block, self._used_bytes, numel, dtype, self)
        self._used_bytes += nbytes
        with self._at_work([array], []):
            array.zero_()
        return array

    # Values.

    def read(self, array: torch.Tensor, out: torch.Tensor) -> None:
        """Copy ``array``, as it is after all that was begun, to ``out`` (flat, in host memory)."""
        with self._lock:
            for stream in _CHANGING:
                self.device.wait_for(Stream.DOWN, self.device.record(stream))
            for part, piece in self._pieces(array, out):
                self.device.copy(Stream.DOWN, piece, part[0])
                self.device.record(Stream.DOWN).wait()
                part[1].copy_(piece)

    def write(self, array: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` (flat, in host memory) to ``array``, after all that was begun."""
        with self._lock:
            for stream in _CHANGING:
                self.device.wait_for(Stream.UP, self.device.record(stream))
            for part, piece in self._pieces(array, values):
                piece.copy_(part[1])
                self.device.copy(Stream.UP, part[0], piece)
                self.device.record(Stream.UP).wait()

    def _pieces(
        self, array: torch.Tensor, other: torch.Tensor
    ) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Parts of both that go at once, and where on the bridge they do."""
        elements = self._bridge.numel() // array.dtype.itemsize
        bridge = self._bridge.view(array.dtype)
        for start in range(0, array.numel(), elements):
            part = array[start : start + elements]
            yield (part, other[start : start + elements]), bridge[: part.numel()]

    # Updates.

    @contextmanager
    def updating(
        self, subgroup: int, arrays: Sequence[torch.Tensor], *, by: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Operations inside change ``arrays`` of ``subgroup``, and read others: they are given to
        the device, behind all that was computed, and in front of what is computed after
        ``before_compute``.
        """
        with self._at_work(arrays, by):
            yield
        self._updated[subgroup] = self.device.record(Stream.UPDATE)

    @contextmanager
    def _at_work(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        self.device.wait_for(Stream.UPDATE, self.device.record(Stream.COMPUTE))
        for array in written:
            self.device.uses(Stream.UPDATE, array, writes=True)
        for array in read:
            self.device.uses(Stream.UPDATE, array)
        with self.device.on(Stream.UPDATE):
            yield

    def before_compute(self, subgroups: Sequence[int]) -> None:
        """What this thread computes from now on comes after the last updates of ``subgroups``."""
        for subgroup in subgroups:
            event = self._updated.get(subgroup)
            if event is not None:
                self.device.wait_for(Stream.COMPUTE, event)

    def uses(self, array: torch.Tensor, *, writes: bool = False) -> None:
        """What this thread computes from now on accesses ``array``, and next also ``writes``."""
        self.device.uses(Stream.COMPUTE, array, writes=writes)

    def close(self) -> None:
        """Let go of the memory, once no stream is at it any more. Idempotent."""
        for stream in Stream:
            self.device.record(stream).wait()
        self._block = None
