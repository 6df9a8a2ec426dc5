"""From the optimizer that a trainer makes to the one that updates offloaded state.

The trainer makes its own optimizer over the plain parameters, before they have any state: so its
groups (no decay of biases and norms, rates of their own) are what they ever were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import infinity
from infinity.values.leaves import leaves_of

_OWN = ("amsgrad", "maximize", "differentiable")
"""Options of ``torch.optim.AdamW`` that ``infinity.AdamW`` has not."""
_HOW = ("foreach", "capturable", "fused", "decoupled_weight_decay", "params")
"""Those that say how it computes, not what."""


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


def is_native(made: torch.optim.Optimizer) -> bool:
    """Whether ``infinity.AdamW`` computes what this optimizer does."""
    if type(made) is not torch.optim.AdamW:
        return False
    return not any(group.get(name) for group in made.param_groups for name in _OWN)


def names_of(model: torch.nn.Module, made: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters in each of the groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in made.param_groups]


def set_groups(
    offloaded: infinity.OffloadedModel,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
) -> None:
    """Give ``offloaded.optimizer`` these groups, of the parameters with these names outside."""
    parts = {
        leaf.name: [part.parameter for part in leaf.parts]
        for leaf in leaves_of(offloaded.model, offloaded._training.records)
    }
    offloaded.optimizer.param_groups.clear()
    for group, members in zip(groups, names, strict=True):
        options = {key: value for key, value in group.items() if key not in _OWN + _HOW}
        parameters = [part for name in members for part in parts[name]]
        offloaded.optimizer.add_param_group(options | {"params": parameters})
