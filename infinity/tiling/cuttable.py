"""Which parameters can be in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from infinity.tiling.tile import CHILD

Owner = tuple[str, nn.Module, str]
"""What the model calls a module, the module, and what that calls a parameter."""
_PACKED = "in_proj_weight"
_PROJECTIONS = (_PACKED, "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Of ``nn.MultiheadAttention``; the first has those of query, key and value."""
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Stacks of matrices, of what transformers calls experts."""


def summed_with_adapters(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """The parameters, by module and name, in whose place PEFT puts the sum of them and an adapter
    while the module computes (``target_parameters``).
    """
    wrappers: list[Any] = [m for m in model.modules() if hasattr(m, "get_base_layer")]
    return {
        (wrapper.get_base_layer(), wrapper.parameter_name)
        for wrapper in wrappers
        if isinstance(getattr(wrapper, "parameter_name", None), str)
    }


def reason_against(
    owners: Sequence[Owner], parameter: nn.Parameter, *, is_partitioned: bool
) -> str | None:
    """Why the parameter cannot be cut where it is; None if it can."""
    for name, module, own in owners:
        reason = _reason_against_use(module, own, is_partitioned=is_partitioned)
        if reason is not None:
            names = " and ".join(name for name, *_ in owners)
            tied = f"tied: {names} share it, and {name} is {reason}"
            return tied if len(owners) > 1 else f"of {reason}"
    if type(parameter) is not nn.Parameter:
        return f"a {type(parameter).__name__}, which is not nn.Parameter itself"
    return _reason_against_parameter(parameter)


def _reason_against_use(module: nn.Module, own: str, *, is_partitioned: bool) -> str | None:
    """What kind of module cannot do with tiles in the place of its parameter ``own``."""
    kind = type(module).__name__
    what = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    if "forward" in vars(module):
        return f"{what} with a forward of its own"
    if hasattr(module, CHILD):
        return f"{what} that has something called {CHILD!r}"
    if isinstance(module, nn.Embedding) and own == "weight":
        if module.max_norm is not None:
            return f"{what} with max_norm, which changes rows as it looks them up"
        return f"{what} with sparse=True" if module.sparse else None
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
        return None if own == "weight" else f"{what}, which is cut by its weight alone"
    if type(module) is nn.MultiheadAttention and own in _PROJECTIONS:
        return None
    if own in _OF_EXPERTS and {"has_gate", "is_transposed", "config"} <= vars(module).keys():
        how = getattr(module.config, "_experts_implementation", None)
        by_one = how == "eager" or how is None
        if how == "grouped_mm" or (by_one and not is_partitioned and not module.is_transposed):
            return None
        where = " over ranks" if by_one and is_partitioned else ""
        return f"{what} with experts_implementation={how!r}{where}"
    return f"{what}, which is none of nn.Linear, nn.Embedding and nn.MultiheadAttention"


def _reason_against_parameter(parameter: torch.Tensor) -> str | None:
    """What ``parameter`` has that cannot be cut with it."""
    hooked: Any = parameter
    if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
        return "a parameter with hooks"
    gradient = parameter.grad
    if gradient is not None and (
        gradient.layout != torch.strided or gradient.dtype != parameter.dtype
    ):
        return "a parameter with a gradient that is sparse or of another dtype"
    return None


def whole_parts_of(owners: Sequence[Owner]) -> int:
    """The number of tiles is a multiple of this, so that what a module takes apart are tiles."""
    packed = any(type(m) is nn.MultiheadAttention and own == _PACKED for _, m, own in owners)
    return 3 if packed else 1
