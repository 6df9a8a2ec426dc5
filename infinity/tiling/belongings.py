"""What a layer and its parameters have beside values (attributes, hooks, buffers, gradients): what
of it a ``TiledLinear`` in the layer's place can have as well, and what it cannot.

Buffers are in one dictionary for both. The dictionaries of hooks that a program fills inside the
block pass to the layer with it, so that handles still remove them. Everything here can be done
again after an interrupt.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.parameters.offloaded.assigned import when_flagged
from infinity.parameters.offloaded.placeholders import as_they_are, refusal_past_tiles

_FORWARD_HOOKS = (
    *("_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_BUFFERS = ("_buffers", "_non_persistent_buffers_set")
_OWN = frozenset(
    vars(nn.Linear(1, 1, device="meta")) | {"forward": None, "has_bias": None, "faces": None}
) - {"_is_full_backward_hook"}
"""Of every layer, or made anew for what stands for it."""


def reason_against(layer: nn.Linear) -> str | None:
    """What ``layer`` has that tiles in its place would lack; None if that is nothing."""
    if "forward" in vars(layer) or any(
        getattr(layer, hooks) for hooks in (*_FORWARD_HOOKS, *_STATE_HOOKS)
    ):
        return "of a layer with hooks or a forward of its own"
    if layer._modules or layer._parameters.keys() - {"weight", "bias"}:
        return "of a layer with more than a weight and a bias"
    reasons = map(reason_against_parameter, layer.parameters(recurse=False))
    return next((f"of a layer {reason}" for reason in reasons if reason is not None), None)


def reason_against_parameter(parameter: torch.Tensor) -> str | None:
    """What ``parameter`` has that cannot be cut with it, as what is said of a layer."""
    hooked: Any = parameter
    if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
        return "whose parameters have hooks"
    gradient = parameter.grad
    if gradient is not None and (
        gradient.layout != torch.strided or gradient.dtype != parameter.dtype
    ):
        return "with a gradient that is sparse or of another dtype"
    return None


def share(layer: nn.Linear, tiled: nn.Module) -> None:
    """Let ``tiled`` have what ``layer`` has and tiles have not."""
    for name in _BUFFERS:
        vars(tiled)[name] = vars(layer)[name]
    _copy_attributes(layer, tiled)


def give_back(layer: nn.Linear, tiled: nn.Module) -> None:
    """Let ``layer`` have what became of that, and the hooks on ``tiled``."""
    for name in _FORWARD_HOOKS:
        vars(layer)[name] = vars(tiled)[name]
    _copy_attributes(tiled, layer)


def _copy_attributes(source: nn.Module, target: nn.Module) -> None:
    for name in vars(target).keys() - vars(source).keys() - _OWN:
        vars(target).pop(name, None)
    vars(target).update({name: vars(source)[name] for name in vars(source).keys() - _OWN})


def cut_gradient(
    gradient: torch.Tensor, parameter: torch.Tensor, rows: list[tuple[Any, tuple[int, int]]]
) -> None:
    """Give the tiles of a parameter, with their rows, the ``gradient`` that it has."""
    for tile, (start, stop) in rows:
        tile.grad = gradient[start:stop]
    parameter.grad = None


def watch_arrivals(whole: Any, name: str, tiles: Sequence[nn.Parameter]) -> None:
    """Refuse gradients that reach ``whole``, which stands for the ``tiles``, where none of these
    would get them: functions of autograd take it without a word. What is not trained has none until
    a tile is flagged.
    """
    stands = weakref.ref(whole)  # a parameter is itself again after the block, whatever is left

    def refuse(gradient: torch.Tensor | None) -> None:
        if type(stands()) is nn.Parameter or gradient is None:
            return
        if any(tile.requires_grad for tile in tiles):
            raise RuntimeError(refusal_past_tiles(name))

    def watch() -> None:
        face: Any = torch.Tensor  # its own methods: those of a tiled weight are about the tiles
        standing: Any = stands()
        if standing is None or vars(standing).get("_arrivals") is not None:
            return
        with torch._C.DisableTorchFunctionSubclass(), as_they_are():
            face.requires_grad_(standing)
            standing._arrivals = face.register_hook(standing, refuse)

    if any(tile.requires_grad for tile in tiles):
        return watch()
    for tile in tiles:
        when_flagged(tile, watch)


_OUTPUT_NR: Any = torch.Tensor.output_nr
OF_GRADIENT = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    _OUTPUT_NR.__get__,
)
"""What hooks on gradients and ``get_gradient_edge`` call."""


def asks_for_node(func: Any, args: Any) -> bool:
    """Whether it is a view that autograd's node for a parameter is reached through."""
    is_view = func in (torch.Tensor.expand_as, torch.Tensor.view_as) and args[0] is args[1]
    return is_view and torch.is_grad_enabled() and bool(args[0].requires_grad)
