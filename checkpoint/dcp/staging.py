"""What `async_save` copies before it returns: as torch does of its own, but by values."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu
from torch.distributed.checkpoint import staging
from torch.utils._pytree import tree_leaves, tree_map_only


class Staging(staging.AsyncStager):
    """Torch's stager copies memory, and knows nothing of the conjugate or the sign that a view
    stands for: such tensors are given to it as ordinary ones.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy that no change of `state_dict` reaches."""
        if any(map(_is_lazy, tree_leaves(state_dict))):
            state_dict = tree_map_only(torch.Tensor, _resolved, state_dict)
        default = getattr(staging, "DefaultStager", None)
        if default is None:  # before torch 2.9
            return dict(_offload_state_dict_to_cpu(state_dict))
        stager = default(staging.StagingOptions(False, False, False, False))
        try:
            staged: dict[str, Any] = stager.stage(state_dict)
        finally:
            stager.close()  # its memory is that of what it staged
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for: `stage` has copied all."""

    def close(self) -> None:
        """Nothing is kept from one save to the next."""


def _is_lazy(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor
