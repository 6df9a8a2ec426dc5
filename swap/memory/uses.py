"""Who refers to the memory of a tensor: what others hold is not free when one lets go of it."""

from __future__ import annotations

import torch


def other_uses(tensor: torch.Tensor) -> int:
    """How many refer to the storage of ``tensor`` beside it: other tensors over it, for the most
    part. What Python has of the storage itself is not counted.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _USES_OF_ONE


_one = torch.empty(1, device="cpu")
_USES_OF_ONE: int = torch._C._storage_Use_Count(_one.untyped_storage()._cdata)
"""What torch counts for a storage that one tensor refers to, and Python as it asks."""
