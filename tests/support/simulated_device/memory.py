"""Memory of a simulated device, and whose memory a tensor lies in."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from swap.storage.components import page_aligned
from tests.support.simulated_device.order import Region

POISON = 0xFF
"""Of all floating-point formats a NaN."""


class Block:
    """One block of device memory: bytes that nothing has written are poison."""

    def __init__(self, device: object, nbytes: int) -> None:
        self.device = device
        self.bytes = page_aligned(nbytes)
        self.bytes.fill_(POISON)
        self.address = self.bytes.data_ptr()
        self.ranges: list[Range] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.address <= tensor.data_ptr() < self.address + self.bytes.numel()


class Range(Region):
    """A range of a block that was handed out; not alive any more when the last view is gone."""

    def __init__(self, block: Block, offset: int, nbytes: int) -> None:
        super().__init__(f"device memory at {offset}", nbytes)
        self.block = block
        self.offset = offset
        self.is_alive = True

    @property
    def bytes(self) -> torch.Tensor:
        return self.block.bytes[self.offset : self.offset + self.nbytes]


class Shown:
    """What a tensor over a range keeps alive."""

    def __init__(self, block: Block, offset: int, nbytes: int, owner: object) -> None:
        self._kept = block, owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (block.address + offset, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self)).view(dtype)


class Storage(Region):
    """Memory that is none of a block: of the host, or of torch on the device."""

    def __init__(self, tensor: torch.Tensor, *, is_host: bool) -> None:
        where = tensor.untyped_storage()
        kind = "host memory" if is_host else "memory of the program"
        super().__init__(f"{kind} of {where.nbytes()} bytes", where.nbytes())
        self.is_host = is_host
        self.key = where._cdata
        self.start = where.data_ptr()
        self._weak = StorageWeakRef(where)

    @property
    def is_alive(self) -> bool:
        return not self._weak.expired()

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """The bytes there; None if the memory was let go of."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None:
            return None
        whole: Any = torch.empty(0, dtype=torch.uint8)
        flat: torch.Tensor = whole.set_(storage)
        return flat[start:stop]


def finalizer(shown: Shown, dead: list[Range], place: Range) -> weakref.finalize[..., Shown]:
    """Tells of the end of the last view."""
    end = weakref.finalize(shown, dead.append, place)
    end.atexit = False
    return end
