"""From the optimizer that a trainer makes to the one that updates offloaded state.

The trainer makes its own optimizer over the plain parameters, before they have any state: so its
groups (no decay of biases and norms, rates of their own) are what they ever were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import infinity
from infinity.integrations.takeover import is_native


def chosen(
    made: torch.optim.Optimizer,
    again: Callable[[], torch.optim.Optimizer],
    state_dtype: torch.dtype,
) -> infinity.AdamW | Callable[[Any], torch.optim.Optimizer]:
    """What to pass to ``infinity.offload`` for the optimizer that a trainer ``made``; ``again``
    makes it of the parameters as they are inside the block, where layers may be tiled.

    Raises ``ValueError`` for a ``state_dtype`` of an optimizer that keeps its own.
    """
    if is_native(made):
        first = made.param_groups[0]
        options = {name: first[name] for name in ("betas", "eps", "weight_decay")}
        return infinity.AdamW(lr=float(first["lr"]), state_dtype=state_dtype, **options)
    if state_dtype != torch.float32:
        raise ValueError(
            f"state_dtype={state_dtype} is an option of AdamW; {type(made).__name__} keeps state "
            "in dtypes of its own"
        )
    return lambda _: again()
