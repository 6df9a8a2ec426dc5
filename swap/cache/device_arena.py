"""Weights in memory of a compute device, copied there behind the program.

Weights pass from NVMe through a landing buffer in host memory to the device; weights that are kept
in HOST go straight there. All copies up are on one stream: what computes with an entry comes after
the last of its copies, on the device, and a landing buffer or a staging slot is used again when the
host sees that the copy is over.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import torch

from aio import Slab, SlabFullError
from aio.errors import let_go
from swap.cache.arena import Entry, Transfer
from swap.device.interface import ComputeDevice, Event, Stream
from swap.device.memory import DeviceMemory
from swap.plan.layout import ParameterSpec
from swap.storage.components import as_tensor


class DeviceArena:
    """Entries are ranges of device memory; reads land in host memory first."""

    uses_home = False

    def __init__(self, device: ComputeDevice, memory: DeviceMemory, landing: Slab | None) -> None:
        self._device = device
        self._memory = memory
        self._landing = landing
        self._begun: list[torch.Tensor] = []
        """What copies were begun from that no event stands for, as an error came in between."""
        self._uploads: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._lock = threading.RLock()  # guards both

    @property
    def pace_bytes(self) -> int:
        """What lands has to be read in time; what is at home in host memory is there."""
        return self.nbytes if self._landing is None else min(self.nbytes, self._landing.nbytes)

    def can_land(self, spec: ParameterSpec) -> bool:
        if self._landing is None:
            return False
        with self._lock:
            self._drop_finished_uploads()
        return self._landing.largest_free_bytes >= _landing_bytes(spec)

    def new(self, spec: ParameterSpec, *, landing: bool, apart: bool = False) -> Entry:
        if landing and not self.can_land(spec):
            raise SlabFullError(_landing_bytes(spec), 0, 0)
        # First what may be refused: to give the other back again would look as if room had come.
        weight = self._memory.allocate(spec.numel, spec.dtype, first=Stream.UP, apart=apart)
        return Entry(spec=spec, weight=weight, landing=self._land(spec) if landing else None)

    def _land(self, spec: ParameterSpec) -> torch.Tensor:
        assert self._landing is not None
        return as_tensor(self._landing.allocate(_landing_bytes(spec)), spec.dtype)

    def fill(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        entry.event = self._upload(entry, start, values)

    def put(self, entry: Entry, start: int, values: torch.Tensor) -> Transfer:
        entry.event = event = self._upload(entry, start, values)
        return DeviceCopy(event)

    def note_released(self) -> None:
        with suppress(RuntimeError):  # of the device: it is asked again where room is wanted
            self._memory.collect()

    def wait_for_copies_from(self, values: torch.Tensor | None) -> None:
        """What a pass behind the last gradient computes with may be among them."""
        with self._lock:
            self._drop_finished_uploads()
            copies = [
                event
                for event, sources in self._uploads
                if values is None or any(_overlap(source, values) for source in sources)
            ]
        for event in copies[-1:]:  # they come one after the other
            event.wait()

    def arrived(self, entry: Entry) -> None:
        landing = entry.landing
        if landing is None:
            return
        for start, length in entry.landed:
            entry.event = self._upload(entry, start, landing[start : start + length])
        entry.landing = None  # last: what fails or is interrupted before is done again

    def _upload(self, entry: Entry, start: int, values: torch.Tensor) -> Event:
        """Start copying; what is copied from stays until that is over, whatever becomes of the
        entry.
        """
        with self._lock:
            self._drop_finished_uploads()
            target = entry.weight[start : start + values.numel()]
            self._begun.append(values)
            self._device.copy(Stream.UP, target, values)
            return self._note_begun()

    def _note_begun(self) -> Event:
        """The moment at which all copies that were begun are over."""
        event = self._device.record(Stream.UP)
        if self._begun:
            self._uploads.append((event, self._begun))
            self._begun = []
        return event

    def ready(self, entry: Entry) -> torch.Tensor:
        self._memory.collect()
        if entry.event is not None:
            self._device.wait_for(Stream.COMPUTE, entry.event)
        self._device.uses(Stream.COMPUTE, entry.weight)
        return entry.weight

    def read_back(self, entry: Entry, start: int, out: torch.Tensor) -> Transfer | None:
        # Not behind the gradients, which wait for what is computed.
        if entry.event is not None:
            self._device.wait_for(Stream.BACK, entry.event)
        return DeviceRead(self._device, out, entry.weight[start : start + out.numel()])

    def wait_for_release(self, timeout: float) -> bool:
        if self._finish_upload() or (self._landing and self._landing.wait_for_release(0.0)):
            return True
        return self._memory.wait_for_release(timeout)

    def _finish_upload(self) -> bool:
        """Wait for the first one, which makes room to land; False if there is none."""
        with self._lock:
            event = self._uploads[0][0] if self._uploads else None
        if event is None:
            return False
        event.wait()
        with self._lock:
            self._drop_finished_uploads()
        return True

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._memory.peak_bytes

    def _drop_finished_uploads(self) -> None:
        if self._begun:
            self._note_begun()
        while self._uploads and self._uploads[0][0].done():
            self._uploads.popleft()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of memory in a row."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


class DeviceCopy:
    """A copy from or to host memory, which is waited for as a read or a write is."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def result(self) -> None:
        self._event.wait()


class DeviceRead:
    """A copy back to host memory. From its beginning on somebody else has to wait for it, so what
    the device raises comes up there: an error here would have ``out`` given to others.
    """

    def __init__(self, device: ComputeDevice, out: torch.Tensor, source: torch.Tensor) -> None:
        self._device = device
        self._event: Event | None = None
        self._failure: Exception | None = None
        try:
            device.copy(Stream.BACK, out, source)
            self._over()
        except Exception as failure:
            self._failure = let_go(failure)

    def done(self) -> bool:
        return self._over().done()

    def result(self) -> None:
        self._over().wait()
        if self._failure is not None:
            raise let_go(self._failure)

    def _over(self) -> Event:
        """A moment behind it, noted when that can be."""
        if self._event is None:
            self._event = self._device.record(Stream.BACK)
        return self._event


def _landing_bytes(spec: ParameterSpec) -> int:
    """Whole pages, for direct reads."""
    return spec.padded_numel * spec.dtype.itemsize
