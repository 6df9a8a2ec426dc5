"""What a parameter has beside values (attributes, a gradient), cut with it; and gradients that come
to what stands for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.parameters.offloaded.assigned import when_flagged
from infinity.parameters.offloaded.placeholders import as_they_are, refusal_past_tiles
from infinity.tiling.tile import RowRange


def rows_of_parameter(parameter: torch.Tensor, rows: RowRange) -> nn.Parameter:
    """A tile: those rows, where they lie if that is contiguous, and what programs gave them."""
    start, stop = rows
    # Not detach(): a change of one tile would count as one of all.
    tile = nn.Parameter(parameter.data[start:stop].contiguous(), parameter.requires_grad)
    for name, value in vars(parameter).items():
        is_cut = isinstance(value, torch.Tensor) and _has_rows_of(value, parameter)
        vars(tile)[name] = value[start:stop] if is_cut else value
    return tile


def _has_rows_of(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an attribute (a mask, say) is of each element of ``parameter``, or of each row."""
    return value.dim() == parameter.dim() and value.shape[:1] == parameter.shape[:1]


def cut_gradient(parameter: torch.Tensor, tiles: Sequence[tuple[Any, RowRange]]) -> None:
    """Give the tiles of a ``parameter``, with their rows, the gradient that it has."""
    gradient: Any = parameter.grad
    for tile, (start, stop) in tiles:
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
