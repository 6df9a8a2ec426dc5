"""Saved storages of a device on their way to host memory and back, beside what it computes.

A copy down comes after all that the saving thread had given the device; a copy up is waited for by
what is computed from then on. Neither waits on the host: both ends of a copy are kept until it is
over. Host memory is one slab that the device knows, made when the first storage is saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from aio import Slab, SlabFullError
from infinity.activations.storage import SavedStorage, There
from swap.device.interface import ComputeDevice, Event, Stream
from swap.interruptions.undo import Undo

_AHEAD_BYTES = 256 * 1024 * 1024
"""Memory of the device for what a backward pass asks for next; for one storage at least."""
_LOOKAHEAD = 64


@dataclass(frozen=True, slots=True)
class _Copy:
    """One that was started, and both of its ends."""

    over: Event
    host: torch.Tensor
    there: torch.Tensor


class DeviceCopies:
    """Copies between a device and ``nbytes`` of host memory. Not thread-safe."""

    def __init__(self, device: ComputeDevice, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._slab: Slab | None = None
        self._undo = Undo()
        self._down: deque[_Copy] = deque()
        self._up: deque[_Copy] = deque()
        self._starting: tuple[torch.Tensor, torch.Tensor] | None = None

    def close(self) -> None:
        """Idempotent. Waits for what is under way."""
        self._undo.close()
        self._down.clear()
        self._up.clear()
        self._slab = self._starting = None

    def memory(self, nbytes: int, *, waits: bool = True) -> torch.Tensor | None:
        """Bytes that the device knows; None where there is no room, and nothing under way whose end
        would make some, or is to be waited for.
        """
        slab = self._slab or self._open()
        while True:
            self._let_go()
            try:
                return torch.from_numpy(slab.allocate(nbytes))
            except SlabFullError:
                if not waits or not self._wait_for_one():
                    return None

    def bring_down(self, storage: SavedStorage, there: torch.Tensor) -> None:
        """Start copying ``there``, as computed so far, to the memory of a storage."""
        assert storage.memory is not None
        storage.arrival = self._start(Stream.DOWN, storage.memory, there)
        storage.there = There.of(there)

    def bring_up(self, storage: SavedStorage) -> None:
        """Start copying a storage in memory to the device, where it is not there."""
        if storage.ahead is None and storage.there is not None:
            storage.ahead = storage.there.bytes()
        if storage.ahead is not None:
            return
        # No copy down is under way, or its source would be there.
        assert storage.memory is not None
        there = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        over = self._start(Stream.UP, storage.memory, there)
        storage.there = There.of(there, over)
        storage.ahead = there

    def on_device(self, storage: SavedStorage) -> torch.Tensor:
        """The bytes of a storage, for what this thread gives the device from now on."""
        self.bring_up(storage)
        memory, there = storage.ahead, storage.there
        assert memory is not None
        assert there is not None
        if there.since is not None:
            self._device.wait_for(Stream.COMPUTE, there.since)
        storage.ahead = None
        self._let_go()
        return memory

    def _start(self, stream: Stream, host: torch.Tensor, there: torch.Tensor) -> Event:
        """Start a copy after all that this thread has given the device: that computes what goes
        down, and may still be at work on the memory that something comes up to.
        """
        device = self._device
        if self._starting is not None:  # an interrupt came before it was noted
            for one in (Stream.UP, Stream.DOWN):
                device.record(one).wait()
        self._starting = host, there
        device.wait_for(stream, device.record(Stream.COMPUTE))
        down = stream is Stream.DOWN
        device.copy(stream, *((host, there) if down else (there, host)))
        over = device.record(stream)
        (self._down if down else self._up).append(_Copy(over, host, there))
        self._starting = None
        return over

    def _open(self) -> Slab:
        slab = Slab(self._nbytes)
        self._undo.callback(slab.close)
        self._undo.callback(self._device.register(slab))
        self._slab = slab
        return slab

    def _let_go(self) -> None:
        """Of both ends of copies that are over."""
        for copies in (self._down, self._up):
            while copies and copies[0].over.done():
                copies.popleft()

    def _wait_for_one(self) -> bool:
        """For the oldest copy whose end may free host memory; False if there is none."""
        for copies in (self._up, self._down):
            if copies:
                copies[0].over.wait()
                copies.popleft()
                return True
        return False


class Ahead:
    """Brings up what a backward pass asks for next: what was saved before what it has asked for."""

    def __init__(self, copies: DeviceCopies | None) -> None:
        self._copies = copies
        self._brought: dict[int, SavedStorage] = {}

    def follow(
        self,
        number: int,
        alive: Mapping[int, SavedStorage],
        is_here: Callable[[SavedStorage], bool],
    ) -> None:
        """A backward pass has got the storage of this number. ``is_here``: whether the memory of
        one holds its bytes, or is going to, in the order of the device.
        """
        if self._copies is None:
            return
        wanted = _next(alive, number)
        for other in self._brought.keys() - wanted.keys():  # it goes another way, or is past them
            self._brought.pop(other).ahead = None
        for other, storage in wanted.items():
            if not is_here(storage):
                continue
            try:
                self._copies.bring_up(storage)
            except torch.OutOfMemoryError:  # it is brought when it is asked for
                return
            self._brought[other] = storage

    def drop(self, storage: SavedStorage) -> None:
        """Nobody needs it any more."""
        storage.ahead = None
        self._brought.pop(storage.number, None)

    def take_stock(self, alive: Mapping[int, SavedStorage]) -> None:
        """After an interrupt."""
        for storage in alive.values():
            storage.ahead = None
        self._brought.clear()


def _next(alive: Mapping[int, SavedStorage], number: int) -> dict[int, SavedStorage]:
    """Those that are to be on the device when a number is worked on, the first one first."""
    found: dict[int, SavedStorage] = {}
    nbytes = 0
    for earlier in range(number - 1, max(-1, number - 1 - _LOOKAHEAD), -1):
        storage = alive.get(earlier)
        if storage is None:
            continue
        nbytes += storage.nbytes
        if found and nbytes > _AHEAD_BYTES:
            break
        found[earlier] = storage
    return found
