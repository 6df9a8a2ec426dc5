"""Modules that note their parameters by weak references, which stand in the way of giving a
parameter on meta real data: torch does not swap tensors that are referred to so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_weak_references(model: nn.Module) -> Iterator[None]:
    """Recurrent layers have none of theirs inside; they notice by them that a parameter was
    replaced, which cannot be inside the block.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    try:
        for layer in layers:
            # In place: a copy of the layer may have the same list.
            layer._flat_weight_refs[:] = [None] * len(layer._flat_weight_refs)
        yield
    finally:
        for layer in layers:
            # Some may be new ones: see ``parameter.become_plain``.
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
            layer._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in layer._flat_weights
            ]
