"""Who refers to the memory of a tensor: what others hold is not free when one lets go of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def other_uses(tensor: torch.Tensor) -> int:
    """How many refer to the storage of ``tensor`` beside it: other tensors over it, for the most
    part. What Python has of the storage itself is not counted.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _USES_OF_ONE


def storage_at(tensor: torch.Tensor) -> int:
    """The ``_cdata`` of the storage that ``tensor`` lies in."""
    return int(tensor.untyped_storage()._cdata)


def root_of(tensor: torch.Tensor) -> int:
    """The ``_cdata`` of what ``tensor`` is a view of, or of itself."""
    base: Any = tensor if tensor._base is None else tensor._base
    return int(base._cdata)


def own_storage(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The values of ``flat``, contiguous, where they are, in a storage that nothing else lies in,
    and which keeps that memory.
    """
    if not flat.numel():  # it would be in whatever storage it was made of
        return torch.empty(shape, dtype=flat.dtype, device=flat.device)
    own: Any = torch.empty(0, dtype=flat.dtype, device=flat.device)
    alias = from_dlpack(flat.view(torch.uint8))
    there: torch.Tensor = own.set_(alias.untyped_storage(), 0, shape)
    return there


_one = torch.empty(1, device="cpu")
_USES_OF_ONE: int = torch._C._storage_Use_Count(_one.untyped_storage()._cdata)
"""What torch counts for a storage that one tensor refers to, and Python as it asks."""
