"""Saved tensors of autograd that are not weights: which of them are taken, and how they are met
again. What is done with them is decided in ``tiers``.

Invariants:
- A storage is kept once, however many saved tensors lie in it, unless it was changed in between.
- A saved tensor comes back with the bits it had. One that was changed in place since is refused, as
  autograd does: its version counter is kept, without its memory.
- What a graph that is gone had saved is free after the next call; nothing waits for a backward pass
  that never comes.

A change behind autograd's back (through ``.data``) while a tensor is saved is not seen, unless the
program holds the memory: then it is seen as in plain PyTorch. Inside
``torch.utils.checkpoint`` its own hooks are at work instead of these.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.activations.storage import SavedActivation, SavedStorage
from infinity.parameters.offloaded.changes import version_probe_of
from swap.interruptions.forks import check_process
from swap.plain import is_plain

THRESHOLD_BYTES = 256 * 1024
"""Smaller storages stay: as single transfers they cost more time than their memory is worth."""


_OF_EXTENSION = "CppFunction"


def is_of_program(node: Any) -> bool:
    """Whether a node of a graph is a function of Python, or one of an extension in C++, which has
    no type of its own: what it gives may be memory of anybody's, also what it has saved. None of
    torch's own gives that.
    """
    return isinstance(node, BackwardCFunction) or type(node).__name__ == _OF_EXTENSION


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A storage that is saved, as it can be met again: alive, and at that version."""

    where: StorageWeakRef
    version_probe: torch.Tensor
    version: int
    storage: SavedStorage

    def is_still(self, tensor: torch.Tensor) -> bool:
        return (
            not self.where.expired()
            and self.version_probe._version == self.version
            and tensor._version == self.version
        )


class Activations:
    """Saved tensors that are not weights: ``"keep"``, which leaves all to autograd.

    ``held_bytes`` of host memory are kept for saved tensors now, ``peak_bytes`` at most so far,
    of ``budget_bytes`` that are set aside (0 where the memory is not the library's).
    Thread-safe; every call may be made from any thread.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0
        self.budget_bytes = 0
        self._process = os.getpid()
        self._lock: Any = threading.RLock()  # of those who hold it themselves, see ``_is_amid``
        # Finalizers run anywhere, also inside the lock; put() is made to be called there.
        # By references that go to ``_dead`` when what autograd holds does, wherever that is: there
        # C alone runs, and no interrupt is swallowed as in a finalizer.
        self._uses: dict[weakref.ref[SavedActivation], SavedStorage] = {}
        self._dead: queue.SimpleQueue[weakref.ref[SavedActivation]] = queue.SimpleQueue()
        self._alive: dict[int, SavedStorage] = {}
        self._known: dict[int, _Known] = {}
        self._keys: dict[int, int] = {}
        self._left_alone: set[int] = set()
        self._next = 0
        self._closed = False
        self._is_consistent = True  # else an interrupt has come between two of these

    @property
    def peak_budget_bytes(self) -> int:
        """Host memory of the library's budget that was in use, at most so far."""
        return self.peak_bytes if self.budget_bytes else 0

    def counts(self) -> dict[str, int]:
        """Bytes of what is saved for graphs that are alive, by where they are."""
        if self._is_amid():
            return self._counts()
        with self._lock:
            self._begin()
            counts = self._counts()
            self._is_consistent = True
            return counts

    def _counts(self) -> dict[str, int]:
        return {
            "in host": self.held_bytes,
            "in host, peak": self.peak_bytes,
            "on nvme": self._nvme_bytes(),
        }

    def leave_alone(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are in memory for as long as the model is offloaded, saved or not."""
        strided = (tensor for tensor in tensors if tensor.layout == torch.strided)
        self._left_alone.update(tensor.untyped_storage()._cdata for tensor in strided)

    def save(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Take ``tensor``; None leaves it to autograd. Raises ``AioError`` when something could
        not be written; it is kept then, and tried again by the next call.
        """
        if self._is_amid() or not self._is_worth_it(tensor):
            return None
        with self._lock:
            self._begin()
            storage = self._find(tensor) or self._admit(tensor)
            if storage is None:
                self._is_consistent = True
                return None
            saved = SavedActivation(tensor, storage)
            storage.uses += 1
            self._uses[weakref.ref(saved, self._dead.put)] = storage
            self._saved(storage)
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes())
            self._is_consistent = True
        return saved

    def restore(self, saved: SavedActivation) -> torch.Tensor:
        """The tensor with the bits it had. Raises ``AioError``, after which it can be asked for
        again, and ``RuntimeError`` if it was changed in place since.
        """
        saved.check_version()
        if self._is_amid():
            return self._at_hand(saved)
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    "a backward pass needs what its forward pass saved inside the offload block; "
                    "call backward inside the block"
                )
            self._begin()
            tensor = saved.view(self._memory_of(saved.storage))
            self._restored(saved.storage)
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes())
            self._is_consistent = True
            return tensor

    def close(self) -> None:
        """Forget everything, remove the files. Idempotent."""
        with self._lock:
            self._closed = True
            self._begin()
            for storage in self._alive.values():
                storage.memory = None
            self._alive.clear()
            self._known.clear()
            self.held_bytes = 0

    def _is_amid(self) -> bool:
        """Whether the call is one of a signal handler, or of a finalizer, that broke into another
        one of this thread, or of a forked child, which has neither the threads nor the files.
        """
        return self._lock._is_owned() or os.getpid() != self._process

    def _at_hand(self, saved: SavedActivation) -> torch.Tensor:
        """The tensor, if it never left its place."""
        storage = saved.storage
        if storage.memory is None or storage.extent is not None or storage.write is not None:
            check_process(self._process, "what a forward pass saved on NVMe")
            raise RuntimeError(
                "a backward pass of a signal handler (or a finalizer) that broke into another one "
                "needs what is on NVMe; set a flag there, and compute between steps"
            )
        storage.check_whole()
        storage.wait_for_arrival()
        return saved.view(storage.memory)

    # What a mode decides, with the lock held.

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        return False

    def _admit(self, tensor: torch.Tensor) -> SavedStorage | None:
        """A new storage for ``tensor``; None leaves it to autograd."""
        return None

    def _saved(self, storage: SavedStorage) -> None:
        """``storage`` was saved, for the first time or again."""

    def _nvme_bytes(self) -> int:
        """Bytes that are on NVMe."""
        return 0

    def _taken_bytes(self) -> int:
        """Memory in use for saved tensors, also what is not counted to any of them."""
        return self.held_bytes

    def _memory_of(self, storage: SavedStorage) -> torch.Tensor:
        assert storage.memory is not None
        storage.check_whole()
        return storage.memory

    def _restored(self, storage: SavedStorage) -> None:
        """A tensor over the memory of ``storage`` is on its way to a backward pass."""

    def _take_stock(self) -> None:
        """Only storages in ``_alive`` are needed; whatever else is held goes."""
        self.held_bytes = 0
        for storage in self._alive.values():
            if storage.memory is not None:
                self._hold(storage.nbytes)

    def _forget(self, storage: SavedStorage) -> None:
        """Nobody needs ``storage`` any more."""
        if storage.memory is not None:
            self._hold(-storage.nbytes)
        storage.memory = None

    # What they share.

    def _begin(self) -> None:
        """Of all that changes something, with the lock held; what it ends with sets
        ``_is_consistent``. So what an interrupt, or an error, has cut in two is put right here.
        """
        if not self._is_consistent:
            self._find_alive()
            self._take_stock()
        self._is_consistent = False
        self._drop_dead()

    def _find_alive(self) -> None:
        """The tables, from what autograd holds."""
        self._uses = {use: kept for use, kept in self._uses.items() if use() is not None}
        storages = sorted({*self._uses.values()}, key=lambda storage: storage.number)
        for storage in storages:
            storage.uses = 0
        for storage in self._uses.values():
            storage.uses += 1
        self._alive = {storage.number: storage for storage in storages}
        self._known = {
            key: known for key, known in self._known.items() if known.storage.number in self._alive
        }
        self._keys = {known.storage.number: key for key, known in self._known.items()}

    def _add(self, tensor: torch.Tensor, memory: torch.Tensor) -> SavedStorage:
        where = tensor.untyped_storage()
        storage = SavedStorage(self._next, memory.numel(), memory, memory.data_ptr())
        self._next += 1
        self._alive[storage.number] = storage
        self._known[where._cdata] = _Known(
            StorageWeakRef(where), version_probe_of(tensor), tensor._version, storage
        )
        self._keys[storage.number] = where._cdata
        return storage

    def _find(self, tensor: torch.Tensor) -> SavedStorage | None:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known.storage if known is not None and known.is_still(tensor) else None

    def _hold(self, nbytes: int) -> None:
        self.held_bytes += nbytes

    def _drop_dead(self) -> None:
        while True:
            try:
                storage = self._uses.pop(self._dead.get_nowait(), None)
            except queue.Empty:
                return
            if storage is None:  # it was found when stock was taken
                continue
            storage.uses -= 1
            if storage.uses or storage.number not in self._alive:
                continue
            del self._alive[storage.number]
            key = self._keys.pop(storage.number, None)
            if key is not None and key in self._known and self._known[key].storage is storage:
                del self._known[key]
            self._forget(storage)

    def _is_large_and_plain(self, tensor: torch.Tensor) -> bool:
        """Strided, no parameter, over a storage that is not small and not in memory anyway."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and not (tensor.is_quantized or tensor.is_nested or tensor.is_inference())
            and is_plain(tensor)
            and tensor.untyped_storage().nbytes() >= THRESHOLD_BYTES
            and tensor.untyped_storage()._cdata not in self._left_alone
        )
