"""Modules that note their parameters by weak references, which stand in the way of giving a
parameter on meta real data: torch does not swap tensors that are referred to so.
"""

from __future__ import annotations

import weakref

from torch import nn


class WithoutWeakReferences:
    """Context manager: recurrent layers have none of theirs inside; they notice by them that a
    parameter was replaced, which cannot be inside the block.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]

    def __enter__(self) -> None:
        for layer in self._layers:
            # In place: a copy of the layer may have the same list.
            layer._flat_weight_refs[:] = [None] * len(layer._flat_weight_refs)

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            # Some may be new ones: see ``parameter.become_plain``.
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
            layer._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in layer._flat_weights
            ]
