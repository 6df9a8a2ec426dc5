"""A slab of device memory: one block, whose ranges are handed out as tensors.

A range is free when the last view of it is gone, as the host sees it. What streams were given until
then may still be at it, so who gets it next waits for them: on a stream, the host never does. So
memory is used again without asking the device, and no more than the block is ever taken.

Where a range lies matters to no one, but that it is a single one. What is needed at once can have
other memory where the free ranges are too small each; it counts as if it were of the block.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from aio import SlabFullError
from aio.ranges import RangeAllocator
from swap.device.interface import ComputeDevice, Event, Stream
from swap.plan.layout import DEVICE_ALIGNMENT

_APART = -1
"""In place of an offset: the range is a block of its own."""


class _Owner:
    """What a tensor keeps alive until the last view of it is gone."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class _Place:
    """A range that is handed out; ``block`` if it is no part of the slab's."""

    offset: int
    nbytes: int
    block: Any = None


@dataclass(frozen=True, slots=True)
class _Left:
    """A range that nobody has any more, but for streams before ``moments``."""

    place: _Place
    moments: tuple[Event, ...]

    def is_over(self) -> bool:
        return all(moment.done() for moment in self.moments)

    def overlaps(self, start: int, stop: int) -> bool:
        place = self.place
        return place.block is None and place.offset < stop and start < place.offset + place.nbytes


class DeviceMemory:
    """``nbytes`` of a device, handed out in ranges. Thread-safe.

    Raises ``MemoryError`` where the device has not so much.
    """

    def __init__(self, device: ComputeDevice, nbytes: int) -> None:
        self._device = device
        self._allocator = RangeAllocator(nbytes, alignment=DEVICE_ALIGNMENT)
        self._block = device.memory(self._allocator.nbytes)
        # What is handed out, by a reference that goes to ``_ended`` when its owner does. That may
        # be on any thread, also inside the lock, and runs no Python.
        self._ranges: dict[weakref.ref[_Owner], _Place] = {}
        self._ended: queue.SimpleQueue[weakref.ref[_Owner]] = queue.SimpleQueue()
        self._left: deque[_Left] = deque()
        self._is_consistent = True  # else an interrupt has come between two of these
        self._peak_bytes = 0
        self._num_releases = 0
        self._seen = threading.local()  # .releases: how many the thread knew of when it last looked
        self._lock = threading.RLock()  # guards all of this

    def allocate(
        self, numel: int, dtype: torch.dtype, *, first: Stream, apart: bool = False
    ) -> torch.Tensor:
        """A flat tensor with undefined values, which stream ``first`` may write to from now on.

        With ``apart`` it is enough that so many bytes are free, wherever they are. Raises
        ``SlabFullError`` when there is no room, also when the device has none.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype, device=self._device.torch_device)
        with self._lock:
            self._collect()
            self._seen.releases = self._num_releases
            place = self._find(nbytes, apart)
            owner = _Owner()
            self._ranges[weakref.ref(owner, self._ended.put)] = place
            self._is_consistent = True
            self._peak_bytes = max(self._peak_bytes, self._allocator.used_bytes)
            for left in self._left:
                if place.block is None and left.overlaps(place.offset, place.offset + nbytes):
                    self._order(first, left.moments)
        block, offset = (self._block, place.offset) if place.block is None else (place.block, 0)
        return self._device.tensor(block, offset, numel, dtype, owner)

    def _order(self, stream: Stream, moments: tuple[Event, ...]) -> None:
        for moment in moments:
            self._device.wait_for(stream, moment)

    def _find(self, nbytes: int, apart: bool) -> _Place:
        """A range that nobody has; to be noted before anything else."""
        if any(owner() is None for owner in self._ranges) and not self._has(nbytes):
            self._take_stock()  # an interrupt of who waited has lost sight of it
        self._is_consistent = False
        offset = self._allocator.allocate(nbytes) if self._has(nbytes) else None
        if offset is not None:
            return _Place(offset, nbytes)
        self._is_consistent = True
        if not apart or not self._has(nbytes):
            raise SlabFullError(
                nbytes, self._allocator.free_bytes, self._allocator.largest_free_bytes
            )
        try:
            block = self._device.memory(nbytes)
        except MemoryError:
            raise SlabFullError(
                nbytes, self._allocator.free_bytes, self._allocator.largest_free_bytes
            ) from None
        self._is_consistent = False
        self._allocator.apart_bytes += self._allocator.rounded(nbytes)
        return _Place(_APART, nbytes, block)

    def _has(self, nbytes: int) -> bool:
        return self._allocator.rounded(nbytes) <= self._allocator.free_bytes

    def collect(self) -> None:
        """Note the moment at which ranges were let go of, if any were: what uses one of them next
        waits for no more than what streams were given until now.
        """
        if not self._ended.empty():
            with self._lock:
                self._collect()

    def wait_for_release(self, timeout: float) -> bool:
        """Wait until a range has come back; False when none did within ``timeout`` seconds.

        One that came back since this thread last asked for memory, or waited, counts.
        """
        if self._release_is_new():
            return True
        if timeout <= 0:
            return False
        try:
            ended = self._ended.get(timeout=timeout)
        except queue.Empty:
            return self._release_is_new()
        self._ended.put(ended)
        return self._release_is_new()

    def close(self) -> None:
        """Let go of the block, once no stream is at it any more. Idempotent."""
        for moment in self._moments():
            moment.wait()
        self._block = None

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return self._allocator.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._collect()
            return self._allocator.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest ``used_bytes`` so far."""
        with self._lock:
            return self._peak_bytes

    def _release_is_new(self) -> bool:
        with self._lock:
            self._collect()
            is_new = self._num_releases != getattr(self._seen, "releases", 0)
            self._seen.releases = self._num_releases
            return is_new

    def _collect(self) -> None:
        """Take back what has been let go of; with the lock held."""
        if not self._is_consistent:
            self._take_stock()
        ended = []
        while not self._ended.empty():
            self._is_consistent = False
            place = self._ranges.pop(self._ended.get_nowait(), None)
            if place is not None:  # else it was found when stock was taken
                ended.append(place)
        if ended:
            moments = self._moments()
            for place in ended:
                self._take_back(place)
                self._left.append(_Left(place, moments))
            self._num_releases += len(ended)
        self._is_consistent = True
        while self._left and self._left[0].is_over():
            self._left.popleft()

    def _moments(self) -> tuple[Event, ...]:
        return tuple(self._device.record(stream) for stream in Stream)

    def _take_back(self, place: _Place) -> None:
        if place.block is None:
            self._allocator.release(place.offset, place.nbytes)
        else:
            self._allocator.apart_bytes -= self._allocator.rounded(place.nbytes)

    def _take_stock(self) -> None:
        """Take back whatever has no owner, after an interrupt that may have lost sight of it."""
        gone = [place for owner, place in self._ranges.items() if owner() is None]
        self._ranges = {owner: place for owner, place in self._ranges.items() if owner()}
        places = self._ranges.values()
        self._allocator.release_others([place.offset for place in places if place.block is None])
        apart = (place.nbytes for place in places if place.block is not None)
        self._allocator.apart_bytes = sum(map(self._allocator.rounded, apart))
        moments = self._moments()
        self._left.extend(_Left(place, moments) for place in gone)
        self._left.append(_Left(_Place(0, self._allocator.nbytes), moments))
        self._num_releases += 1
        self._is_consistent = True
