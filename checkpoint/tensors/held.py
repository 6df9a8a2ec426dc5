"""Memory that a save reads later: kept alive, and looked at before and after every read.

A reference to a storage or an array keeps its memory through everything but a change of its size,
which frees the memory under whoever holds it. Nothing holds it against that, so that it is looked
for: what has moved or has another size is not read, and what was read meanwhile does not count. A
change of size within one read of one piece (16 MiB at most) cannot be seen in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from checkpoint.errors import ChangedTensorError


class Held(Protocol):
    """The memory of a tensor or an array as it was when this was made."""

    @property
    def tells_all(self) -> bool:
        """Whether nobody can change its values without ``is_there`` telling: what is read from
        where it lies need not be looked at again then.
        """
        ...

    def is_there(self) -> bool:
        """Whether it is still where it was, all of it. Never raises."""
        ...

    def changed(self, name: str) -> ChangedTensorError:
        """The error of a change; ``name`` is that of the tensor in what is saved."""
        ...


class HeldStorage(NamedTuple):
    """That of a tensor. Holds the storage, whatever becomes of the tensor."""

    storage: torch.UntypedStorage
    address: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeldStorage:
        storage = tensor.untyped_storage()
        return cls(storage, storage.data_ptr(), storage.nbytes())

    @property
    def tells_all(self) -> bool:
        return False

    def is_there(self) -> bool:
        storage, address, nbytes = self
        return storage.data_ptr() == address and storage.nbytes() == nbytes

    def changed(self, name: str) -> ChangedTensorError:
        return ChangedTensorError(name)


class HeldArray:
    """That of a numpy array."""

    __slots__ = ("_address", "_array", "_nbytes")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._address = array.ctypes.data
        self._nbytes = array.nbytes

    @property
    def tells_all(self) -> bool:
        return False

    def is_there(self) -> bool:
        return self._array.nbytes == self._nbytes and self._array.ctypes.data == self._address

    def changed(self, name: str) -> ChangedTensorError:
        return ChangedTensorError(name)


class HeldSource(ABC):
    """A `ByteSource` that knows where its bytes lie, keeps their memory alive, is `Held` itself and
    `checkpoint.tensors.changes.Watched`.

    It is read from there, without Python and without a copy where the device takes it so.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def address(self) -> int | None:
        """Of its first byte in host memory, all others behind it; None if it has to be read, and if
        not all of it is here.
        """

    @property
    @abstractmethod
    def tells_all(self) -> bool:
        """As of `Held`."""

    @abstractmethod
    def is_there(self) -> bool:
        """Whether its values are still those of when the save was called, as far as its owner
        changes them. Never raises.
        """

    @abstractmethod
    def changed(self, name: str) -> ChangedTensorError:
        """As of `Held`."""

    @abstractmethod
    def read(self, start: int, out: memoryview) -> None:
        """As of `ByteSource`."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """As of `Watched`."""

    @abstractmethod
    def check_ended(self) -> None:
        """As of `Watched`."""
