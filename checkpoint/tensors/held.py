"""Memory that a save reads later: kept alive, and looked at before and after every read.

A reference to a storage or an array keeps its memory through everything but a change of its size,
which frees the memory under whoever holds it. Nothing holds it against that, so that it is looked
for: what has moved or has another size is not read, and what was read meanwhile does not count. A
change of size within one read of one piece (16 MiB at most) cannot be seen in time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Held(Protocol):
    """The memory of a tensor or an array as it was when this was made."""

    def is_there(self) -> bool:
        """Whether it is still where it was, all of it. Never raises."""
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

    def is_there(self) -> bool:
        storage, address, nbytes = self
        return storage.data_ptr() == address and storage.nbytes() == nbytes


class HeldArray:
    """That of a numpy array."""

    __slots__ = ("_address", "_array", "_nbytes")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._address = array.ctypes.data
        self._nbytes = array.nbytes

    def is_there(self) -> bool:
        return self._array.nbytes == self._nbytes and self._array.ctypes.data == self._address
