"""Tensors of a model over the same memory: in plain PyTorch they change together, offloaded they
would part. Reads the model, changes nothing.

What lies in memory of a trained parameter is looked for where it costs little: in parameters,
buffers and attributes of modules, and in the lists, tuples and dictionaries that attributes are.
Other references (a closure, an object of the program) are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swap.plain import has_bytes, reach_bytes, share_bytes

_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """``tensor``, which lies in bytes [start, end) with gaps maybe; ``what`` it is to the model."""

    start: int
    end: int
    what: str
    name: str
    tensor: torch.Tensor

    @property
    def is_parameter(self) -> bool:
        return self.what == "parameter"


def check_sharing(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ``ValueError`` naming two of ``named``, which are all distinct parameters of
    ``model``, over the same memory, or what else lies in that of one that is trained.
    """
    spans = [
        _span("parameter", name, parameter) for name, parameter in named if has_bytes(parameter)
    ]
    spans += _others(model, {id(parameter) for _, parameter in named})
    spans.sort(key=lambda span: (span.start, span.end))
    reaching: list[_Span] = []
    for span in spans:
        reaching = [other for other in reaching if other.end > span.start]
        for other in reaching:
            refusal = _refusal(other, span)
            if refusal and share_bytes(other.tensor, span.tensor):
                raise ValueError(refusal)
        reaching.append(span)


def _span(what: str, name: str, tensor: torch.Tensor) -> _Span:
    start = tensor.data_ptr()
    return _Span(start, start + reach_bytes(tensor), what, name, tensor)


def _others(model: nn.Module, parameters: set[int]) -> Iterator[_Span]:
    for name, buffer in model.named_buffers():
        if type(buffer) is torch.Tensor and has_bytes(buffer):
            yield _span("buffer", name, buffer)
    for prefix, module in model.named_modules():
        for name, tensor in _attributes(module):
            is_ordinary = (
                type(tensor) in (torch.Tensor, nn.Parameter) and id(tensor) not in parameters
            )
            if is_ordinary and has_bytes(tensor):
                yield _span("attribute", f"{prefix}.{name}" if prefix else name, tensor)


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Hooks that compute an attribute before each forward (spectral_norm) tell its name.
    computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    for name, value in vars(module).items():
        if name in _OF_MODULES or name in computed:
            continue
        for tensor in _items(value):
            if isinstance(tensor, torch.Tensor):
                yield name, tensor


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _refusal(first: _Span, second: _Span) -> str | None:
    """Why these two may not share memory; None if they may."""
    if first.is_parameter and second.is_parameter:
        return (
            f"{first.name} and {second.name} are different parameters over the same memory; tie "
            "them by assigning the same Parameter object to both modules"
        )
    parameter, other = (first, second) if first.is_parameter else (second, first)
    if other.is_parameter or not (parameter.is_parameter and parameter.tensor.requires_grad):
        return None
    instead = "register a clone of it" if other.what == "buffer" else "make it a clone, delete it"
    return (
        f"{other.what} {other.name} and parameter {parameter.name} share memory, and the "
        f"{other.what} would not follow the parameter; compute it from the parameter in forward, "
        f"{instead}, or call requires_grad_(False) on the parameter if it is not to be trained "
        "(with optimizer=None, say)"
    )
