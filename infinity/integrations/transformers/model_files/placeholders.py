"""Parameters that stand for those of a model which is streamed in later, while a trainer puts
adapters around it.

They are on the CPU, so adapters are made there with the values that they have beside a model in
memory; and they take none, being one NaN each. What computes its values from those of the model
(DoRA, PiSSA) has NaN after, too, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

REMEDY = (
    "load the model (AutoModelForCausalLM.from_pretrained), and pass it to the trainer in the "
    "place of its name"
)


class Placeholder(nn.Parameter):
    """Of the parameter that the model calls ``source``; so is every deep copy."""

    source: str

    def __new__(cls, like: torch.Tensor, source: str) -> Placeholder:
        value = torch.full((), torch.nan, dtype=like.dtype, device="cpu").expand(like.shape)
        made: Placeholder = torch.Tensor._make_subclass(cls, value, like.requires_grad)
        made.source = source
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        if id(self) not in memo:
            memo[id(self)] = Placeholder(self, self.source)
        found: Placeholder = memo[id(self)]
        return found

    def is_untouched(self) -> bool:
        """Whether nothing has given it a value."""
        if self.untyped_storage().nbytes() <= self.itemsize:
            return bool(self.detach().as_strided((), ()).isnan())
        return bool(self.detach().isnan().all())


def put_placeholders(model: nn.Module) -> None:
    """In the place of all parameters, which are on the meta device."""
    made = {id(p): Placeholder(p, name) for name, p in model.named_parameters()}
    for module, name, parameter in _places(model):
        module._parameters[name] = made[id(parameter)]


def take_placeholders(model: nn.Module) -> dict[nn.Parameter, str]:
    """Put parameters on the meta device back, also in copies of modules; returns what the model
    calls them.

    Raises ``ValueError`` naming what was computed from their values, which are not there yet.
    """
    _check_beside(model)
    made: dict[int, nn.Parameter] = {}
    names: dict[nn.Parameter, str] = {}
    for module, name, parameter in _places(model):
        if not isinstance(parameter, Placeholder):
            continue
        if not parameter.is_untouched():
            raise _computed(parameter.source)
        if id(parameter) not in made:
            on_meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            made[id(parameter)] = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
            names[made[id(parameter)]] = parameter.source
        module._parameters[name] = made[id(parameter)]
    return names


def _check_beside(model: nn.Module) -> None:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for name, tensor in tensors.items():
        if isinstance(tensor, Placeholder) or tensor.is_meta or not tensor.is_floating_point():
            continue
        if tensor.detach().isnan().any():
            raise _computed(name)


def _computed(name: str) -> ValueError:
    return ValueError(
        f"{name} begins with what is computed from the weights of the model, and one that is given "
        f"by name has none before training begins: {REMEDY}"
    )


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter
