"""Which parameters a model has and where, as it was offloaded: parameters that are put in later are
noticed, because no optimizer, tier or hook would know them.

Modules note their parameters by weak references, too, which stand in the way of giving a parameter
on meta real data: torch does not swap tensors that are referred to so.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Structure:
    """The modules of a model and the parameters of each, when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {id(parameter) for parameter in model.parameters()}
        # Dictionaries, not ``children()``: this is compared at every step.
        self._seen = []
        for name, module in model.named_modules():
            children = list(dict.values(module._modules))
            parameters = list(dict.values(module._parameters))
            self._seen.append((name, module, children, parameters))

    def check(self) -> None:
        """Raises ``RuntimeError`` naming a parameter that was added, or took another's place."""
        for prefix, module, children, parameters in self._seen:
            if not _are_same(dict.values(module._parameters), parameters):
                for name, parameter in dict.items(module._parameters):
                    self._check_known(_joined(prefix, name), parameter)
            if not _are_same(dict.values(module._modules), children):
                self._check_children(prefix, module)

    def _check_children(self, prefix: str, module: nn.Module) -> None:
        for child_name, child in module._modules.items():
            if child is not None:
                inner = _joined(prefix, child_name)
                for name, parameter in child.named_parameters(remove_duplicate=False):
                    self._check_known(_joined(inner, name), parameter)

    def _check_known(self, name: str, parameter: Any) -> None:
        if parameter is not None and id(parameter) not in self._known:
            raise RuntimeError(
                f"{name} was put into the model while it was offloaded (by an assignment, a new "
                "module, an adapter, or resize_token_embeddings): no optimizer and no budget knows "
                "it; change the model before the block, or after it (a trainer ends it by close())"
            )


def _are_same(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


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
            # Some may be new ones: see ``becoming.become_plain``.
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
            layer._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in layer._flat_weights
            ]
