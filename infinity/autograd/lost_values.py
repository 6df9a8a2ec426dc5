"""Parameters that left a block on the meta device, because their values could not be read: a model
that has them is not computed with.

No operator takes such a weight, see ``placeholders.lost``. A module that has one refuses its call
before anything is computed, also in another process, where such a weight arrives as a plain one of
the meta device: on the CPU torch refuses not every use of those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.parameters.offloaded.placeholders import is_placeholder, refusal_of_lost, refuse


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
                if is_placeholder(parameter):
                    refuse(parameter)
                raise RuntimeError(refusal_of_lost(name))


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
