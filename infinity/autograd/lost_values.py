"""Parameters that left a block on the meta device, because their values could not be read: a model
that has them is not computed with.

On the CPU torch refuses not every use of such a weight: ``F.linear`` without a bias reads memory
that is nobody's in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class _Refusal:
    """A hook before ``forward``, for a module that has these parameters itself or in its children:
    (module, name there, name in the model).

    It refuses while they are on the meta device. It is copied and pickled with the module.
    """

    def __init__(self, places: list[tuple[nn.Module, str, str]]) -> None:
        self._places = places

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        for owner, own, name in self._places:
            parameter = owner._parameters.get(own)
            if parameter is not None and parameter.is_meta:
                raise RuntimeError(
                    f"{name} has no values: they could not be read back as an offload block ended, "
                    "and it is on the meta device since, where torch may compute with anything. "
                    "Call retry() of the RestoreError, or give it values: to_empty and "
                    "load_state_dict, or another block with weights= or offloaded.load"
                )


def refuse_calls(model: nn.Module, lost: Collection[nn.Parameter]) -> list[RemovableHandle]:
    """Let a call of what has parameters of ``lost`` raise ``RuntimeError`` that names one, while it
    is on the meta device; removing the handles ends that.
    """
    keys = {id(parameter) for parameter in lost}
    names: Mapping[int, str] = {id(p): name for name, p in model.named_parameters()}
    handles = []
    for module in model.modules():
        places = [
            (owner, own, names[id(parameter)])
            for owner in module.modules()
            for own, parameter in owner._parameters.items()
            if id(parameter) in keys
        ]
        if places:
            handles.append(module.register_forward_pre_hook(_Refusal(places), prepend=True))
    return handles
