"""Storages that autograd saved, and their way to NVMe and back.

A storage is written from where it lies and read into new memory. While its bytes are in memory they
are its *memory*; a storage without memory is on NVMe as a whole. What the program holds as well is
*held elsewhere*: to let go of it would give nothing back, and a program may fill a buffer in parts
that are saved one after the other, which no version counts where numpy or another process does it.

Whoever frees or resizes the memory of a saved tensor behind autograd's back (``resize_`` of its
storage) takes it from under a write, too; it is refused afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aio import AioError, Operation
from infinity.parameters.offloaded.changes import version_probe_of
from swap.device.interface import Event
from swap.interruptions.undo import Undo
from swap.memory.uses import other_uses
from swap.storage.components import as_bytes
from swap.storage.drives.bandwidth import shares
from swap.storage.extents import Extent
from swap.storage.opening import open_extents
from swap.timeline import Timeline

_BLOCK_BYTES = 256 * 1024
ENGINE_BYTES = 8 * _BLOCK_BYTES
"""Memory that the engine takes for each directory: it copies what torch did not align, eight blocks
at a time.
"""
_FIRST_BYTES = 64 * 1024 * 1024
"""Size that swap files are given, on average, when the first storage is written."""
_LABEL = "activation"


@dataclass(frozen=True, slots=True)
class There:
    """Memory of a device, which holds the bytes of a storage after ``since``; from the beginning,
    where the program computed them there.
    """

    where: StorageWeakRef
    since: Event | None = None

    @classmethod
    def of(cls, memory: torch.Tensor, since: Event | None = None) -> There:
        return cls(StorageWeakRef(memory.untyped_storage()), since)

    def bytes(self) -> torch.Tensor | None:
        """None if nobody has it any more."""
        return bytes_over(self.where)


@dataclass(slots=True, eq=False)
class SavedStorage:
    """One storage as it was at one version; ``number`` counts in the order of saving.

    ``memory``: its bytes, flat, on the CPU; ``address`` is where they were as a transfer began.
    ``uses`` counts the saved tensors that lie in it. ``read_into``: memory that they were read
    into, which a backward pass may be at work on when it is nobody else's any more.

    One of a device ``is_copy``: its memory is the library's alone, and holds the bytes once
    ``arrival`` is over. ``there``: memory of the device that holds them, as long as somebody has
    it; ``ahead`` has it for a backward pass that is going to ask for it.
    """

    number: int
    nbytes: int
    memory: torch.Tensor | None
    address: int
    uses: int = 0
    extent: Extent | None = None
    write: Operation | None = None
    read: Operation | None = None
    read_into: StorageWeakRef | None = None
    is_copy: bool = False
    arrival: Event | None = None
    there: There | None = None
    ahead: torch.Tensor | None = None

    def take_again(self) -> bool:
        """Have the memory again that the bytes were read into, if a backward pass still does: it
        asks for each of the tensors that lie in a storage (query, key and value of one product).
        """
        if self.read_into is not None:
            self.memory = bytes_over(self.read_into)
        return self.memory is not None

    @property
    def has_arrived(self) -> bool:
        """Whether its memory holds the bytes, but for what is read."""
        if self.arrival is not None and self.arrival.done():
            self.arrival = None
        return self.arrival is None

    def wait_for_arrival(self) -> None:
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether others refer to the memory of a storage that was never written, or have freed it:
        who needs it is told then.
        """
        if self.is_copy or self.memory is None:
            return False
        if self.extent is not None or self.write is not None:
            return False
        if not self._is_whole or other_uses(self.memory) > 0:
            return True
        return _references_to_storage(self.memory) > _REFERENCES_OF_NONE

    @property
    def is_moving(self) -> bool:
        """Whether a transfer is under way."""
        return any(o is not None and not o.done() for o in (self.write, self.read))

    def check_whole(self) -> None:
        """Raises ``RuntimeError`` if the memory was freed or resized since it was saved."""
        if not self._is_whole:
            raise RuntimeError(
                f"the storage of a saved tensor, {self.nbytes} bytes, was resized before the "
                "backward pass that needs it"
            )

    @property
    def _is_whole(self) -> bool:
        memory = self.memory
        if memory is None:
            return True
        # torch itself may move it, to memory that other processes share.
        is_in_place = memory.data_ptr() == self.address or self.write is None
        return memory.untyped_storage().nbytes() >= self.nbytes and is_in_place


class SavedActivation:
    """What autograd holds instead of a tensor. ``version_probe`` shares its version counter."""

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "offset",
        "size",
        "storage",
        "stride",
        "version",
        "version_probe",
    )

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage) -> None:
        self.storage = storage
        self.version_probe = version_probe_of(tensor)
        self.version = tensor._version
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())

    def check_version(self) -> None:
        """Raises ``RuntimeError`` if the tensor was changed in place since it was saved."""
        if self.version_probe._version != self.version:
            raise RuntimeError(
                f"a {self.dtype} tensor of shape {tuple(self.size)} that is needed for the "
                f"gradient was modified in place: it is at version {self.version_probe._version}, "
                f"version {self.version} was saved"
            )

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, over ``memory`` or over a copy of it on the tensor's device. A backward
        function that changes it in place changes the version of all that share its counter.
        """
        empty: Any = torch.empty(0, dtype=self.dtype, device=self.device)
        there = memory.to(self.device)
        tensor = self.version_probe.detach()
        tensor.data = empty.set_(there.untyped_storage(), self.offset, self.size, self.stride)
        return tensor


class Volume:
    """The swap files that saved storages go to. Not thread-safe."""

    def __init__(
        self, directories: Sequence[str], timeline: Timeline, undo: Undo | None = None
    ) -> None:
        """``undo`` closes it, if it is given, also where making it is interrupted. Raises
        ``OSError`` subclasses naming a directory that cannot be used.
        """
        self._timeline = timeline
        self._leaving: list[SavedStorage] = []
        self._first_bytes = _FIRST_BYTES * len(directories)
        self._undo = Undo()
        if undo is not None:
            undo.callback(self._undo.close)
        try:
            _, self._extents = open_extents(
                self._undo, directories, shares(directories), block_bytes=_BLOCK_BYTES
            )
        except BaseException:
            self._undo.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of extents in use."""
        self._let_leave()
        return self._extents.used_bytes

    def start_write(self, storage: SavedStorage) -> None:
        """Start writing ``storage`` from its memory. Raises ``AioError`` when the disk is full.

        The engine holds the memory until it is written.
        """
        assert storage.memory is not None
        assert storage.write is None
        storage.check_whole()
        storage.wait_for_arrival()
        if self._first_bytes:
            # Room in every directory, or the first would take all until it is full.
            self._extents.reserve(self._first_bytes)
            self._first_bytes = 0
        extent = self._extents.allocate(storage.nbytes)
        storage.address = storage.memory.data_ptr()
        try:
            write = self._extents.write(extent, 0, as_bytes(storage.memory))
        except Exception:  # an interrupt may come behind its beginning: see ``take_stock``
            self._extents.release(extent)
            raise
        storage.write = self._timeline.watch(write, _LABEL, purpose="activations")
        storage.extent = extent  # last: who has one is written, or is being written

    def finish_write(self, storage: SavedStorage) -> None:
        """Wait until ``storage`` is on NVMe, writing it now if it is not. Raises ``AioError``; its
        memory stays then, and a further call writes it elsewhere.
        """
        if storage.write is None and storage.extent is None:
            self.start_write(storage)
        if storage.write is None:
            return
        try:
            self._result(storage.write)
            storage.check_whole()
        except (AioError, RuntimeError):
            self._release(storage)
            storage.write = None
            raise
        storage.write = None

    def start_read(self, storage: SavedStorage, memory: torch.Tensor, *, urgent: bool) -> None:
        """Give ``storage`` new memory, and start reading into it."""
        assert storage.extent is not None
        read = self._extents.read(storage.extent, 0, as_bytes(memory), urgent=urgent)
        storage.read = self._timeline.watch(read, _LABEL, purpose="activations")
        storage.address = memory.data_ptr()
        storage.read_into = StorageWeakRef(memory.untyped_storage())
        storage.memory = memory  # last: what is there holds the bytes, or is being read

    def finish_read(self, storage: SavedStorage) -> None:
        """Wait until the memory of ``storage`` holds its bytes. Raises ``AioError``; it has no
        memory then, and may be read again.
        """
        if storage.read is None:
            return
        try:
            self._result(storage.read)
        except AioError:
            storage.memory = storage.read_into = None
            storage.read = None
            raise
        storage.read = None

    def discard(self, storage: SavedStorage) -> None:
        """Nobody needs ``storage``: its extent is free as soon as no transfer is under way."""
        storage.memory = None
        self._leaving.append(storage)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of discarded storages that the engine is still at work on."""
        self._let_leave()
        return sum(storage.nbytes for storage in self._leaving)

    def wait_for_leaving(self) -> None:
        """Wait for the oldest of them, whatever comes of it."""
        if self._leaving:
            for operation in (self._leaving[0].write, self._leaving[0].read):
                _look_at(operation)

    def take_stock(self, alive: Collection[SavedStorage]) -> None:
        """After an interrupt: nothing is needed but what ``alive`` storages have, and no transfer
        is under way that they do not know of.
        """
        self._extents.drain()
        for storage in alive:
            if storage.extent is None:
                storage.write = None
            if storage.memory is None:
                storage.read = storage.read_into = None
        self._leaving.clear()
        self._extents.release_others([s.extent for s in alive if s.extent is not None])

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._undo.close()

    def _let_leave(self) -> None:
        self._leaving = [storage for storage in self._leaving if not self._let_go(storage)]

    def _let_go(self, storage: SavedStorage) -> bool:
        if storage.is_moving:
            return False
        for operation in (storage.write, storage.read):
            _look_at(operation)
        if storage.extent is not None:
            self._release(storage)
        return True

    def _release(self, storage: SavedStorage) -> None:
        extent, storage.extent = storage.extent, None  # first: it is not to be released twice
        assert extent is not None
        self._extents.release(extent)

    def _result(self, operation: Operation) -> None:
        if operation.done():
            operation.result()
            return
        with self._timeline.span("stall", label=_LABEL):
            operation.result()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that ``tensor`` lies in, flat, in place."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat: torch.Tensor = empty.set_(tensor.untyped_storage())
    return flat


def bytes_over(where: StorageWeakRef) -> torch.Tensor | None:
    """All bytes of a storage, in place; None if nobody has it any more."""
    held: Any = torch.UntypedStorage._new_with_weak_ptr(where.cdata)
    if held is None:
        return None
    empty: Any = torch.empty(0, dtype=torch.uint8, device=held.device)
    flat: torch.Tensor = empty.set_(held)
    return flat


def _references_to_storage(tensor: torch.Tensor) -> int:
    """What Python counts for the storage itself, as an object, of which a program may have one."""
    where = tensor.untyped_storage()
    return sys.getrefcount(where)


_REFERENCES_OF_NONE = _references_to_storage(torch.empty(1, device="cpu"))


def _look_at(operation: Operation | None) -> None:
    """Take note of a failure that no longer matters, or the engine reports it."""
    if operation is not None:
        operation.abandon()
