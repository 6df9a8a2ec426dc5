"""Products with matrices of a stack (the experts of a layer) that is in tiles: each row of the
input with the one that it is for.

An expert that got no rows has a gradient of zeros where others of the same layer got some, as it
has in a stack that is not in tiles: to an optimizer that is not the same as none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from infinity.tiling.gradients import deferred
from infinity.tiling.pieces import check_unchanged
from infinity.tiling.tile import Tile
from infinity.tiling.wholes import VersionsOf

Span = tuple[int, int, int]
"""A matrix of a tile, and the first row and the row after the last that are for it."""


_here = threading.local()


def selected() -> dict[int, bool]:
    """Of the stacks whose modules compute on this thread, by their ``id``, whether single matrices
    were taken.
    """
    found: dict[int, bool] = vars(_here).setdefault("selected", {})
    return found


def begin_computing(stack: object) -> None:
    """Its module computes with it on this thread."""
    selected()[id(stack)] = False


def end_computing(stack: object) -> bool:
    """That has ended. Returns whether it took single matrices. Idempotent."""
    return selected().pop(id(stack), False)


def multiply_groups(
    tiles: Sequence[Tile],
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    is_transposed: bool,
    fetches_all: bool,
) -> torch.Tensor:
    """``torch._grouped_mm(x, weight, offs=ends)``; ``is_transposed``: with the transposed matrices.

    ``fetches_all``: also tiles that no row is for.
    """
    bounds = [0, *ends.tolist()]
    spans = [
        [
            (at, *rows)
            for at, rows in enumerate(pairwise(bounds[tile.start : tile.stop + 1]))
            if rows[0] < rows[1]
        ]
        for tile in tiles
    ]
    weights = [tile.parameter for tile in tiles]
    return _multiply_groups(x, tiles, spans, is_transposed, fetches_all, *weights)


def touch(output: torch.Tensor, tiles: Sequence[Tile]) -> torch.Tensor:
    """``output`` again, with gradients of zeros for all tiles."""
    return _touch(output, tiles, *[tile.parameter for tile in tiles])


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tiles: Sequence[Tile],
        spans: Sequence[Sequence[Span]],
        is_transposed: bool,
        fetches_all: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        columns = weights[0].shape[1 if is_transposed else 2]
        out = x.new_zeros((len(x), columns))
        for tile, own in zip(tiles, spans, strict=True):
            if own or fetches_all:
                tile(_fill, x, out, own, is_transposed)
        ctx.save_for_backward(x)
        ctx.tiles, ctx.spans, ctx.is_transposed = tiles, spans, is_transposed
        ctx.fetches_all = fetches_all
        ctx.versions = [VersionsOf.of_tile(weight) for weight in weights]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        needs_x, _, _, _, _, *needs_weights = ctx.needs_input_grad
        of_x = torch.zeros_like(x) if needs_x else None
        of_weights: list[torch.Tensor | None] = []
        for tile, spans, versions, needs_weight in zip(
            ctx.tiles, ctx.spans, ctx.versions, needs_weights, strict=True
        ):
            if of_x is not None and (spans or ctx.fetches_all):
                check_unchanged(tile, versions)
                tile(_fill, gradient, of_x, spans, not ctx.is_transposed)
            make = _maker(tile, spans, x, gradient, is_transposed=ctx.is_transposed)
            of_weights.append(deferred(tile.parameter, make) if needs_weight else None)
        return of_x, None, None, None, None, *of_weights


def _fill(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    spans: Sequence[Span],
    is_transposed: bool,
) -> torch.Tensor:
    for at, start, stop in spans:
        matrix = weight[at].t() if is_transposed else weight[at]
        out[start:stop] = _mm(x[start:stop], matrix)
    return out


def _maker(
    tile: Tile,
    spans: Sequence[Span],
    x: torch.Tensor,
    gradient: torch.Tensor,
    *,
    is_transposed: bool,
) -> Callable[[], torch.Tensor]:
    weight = tile.parameter

    def make() -> torch.Tensor:
        out = torch.zeros(weight.shape, dtype=weight.dtype, device=gradient.device)
        for at, start, stop in spans:
            rows, outputs = x[start:stop], gradient[start:stop]
            pair = (outputs.t(), rows) if is_transposed else (rows.t(), outputs)
            out[at] = _mm(*pair)
        return out

    return make


def _mm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """In their own dtype, also within ``autocast``, which leaves ``_grouped_mm`` alone."""
    with torch.autocast(first.device.type, enabled=False):
        return torch.mm(first, second)


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, tiles: Sequence[Tile], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.tiles = tiles
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, _, *needs = ctx.needs_input_grad
        of_weights = [
            deferred(tile.parameter, _zeros(tile.parameter)) if needed else None
            for tile, needed in zip(ctx.tiles, needs, strict=True)
        ]
        return gradient, None, *of_weights


def _zeros(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)


_multiply_groups: Callable[..., torch.Tensor] = _Groups.apply
_touch: Callable[..., torch.Tensor] = _Touch.apply
