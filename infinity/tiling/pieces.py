"""What is computed with a weight in tiles: rows looked up, products with rows as outputs.

Each function writes what one tile gives into an output that it passes on, so that a chain of them
makes the whole. The backward pass runs through the chain the other way, a tile at a time: no
weights are kept for it, they are fetched again, and gradients of weights are deferred to when they
are taken.

Every element is computed as with the whole weight: a row is looked up, and its gradient added up
in the order of the indices; an output is one dot product. The gradient of the input of a product
is a sum over tiles, each rounded to its dtype, where the whole weight is summed over at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from infinity.tiling.gradients import deferred
from infinity.tiling.tile import Tile
from infinity.tiling.wholes import VersionsOf


@dataclass(frozen=True, slots=True)
class Rows:
    """How rows are looked up, as ``F.embedding`` takes it; no padding is -1."""

    padding: int
    scale_by_frequency: bool
    fetches_all: bool
    """Whether tiles that no index asks for are fetched, too."""


def is_usual(x: Any) -> bool:
    """Whether tiles serve this operand: others, forward derivatives, and transforms of torch.func
    take the whole.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    is_dense = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
    return is_dense and not x.is_meta and forward_ad._current_level < 0


def takes_indices(indices: torch.Tensor, padding: int | None, rows: int) -> bool:
    """Whether torch looks such indices up among so many rows, and has that padding."""
    is_padding = padding is None or -rows <= padding < rows
    return is_padding and indices.dtype in (torch.int64, torch.int32)


def look_up(tiles: Sequence[Tile], indices: torch.Tensor, how: Rows) -> torch.Tensor:
    """The rows at ``indices``, which are within the weight that has these tiles."""
    first = tiles[0].parameter
    out = torch.empty((*indices.shape, *first.shape[1:]), dtype=first.dtype, device=indices.device)
    for tile in tiles:
        out = _lookup(out, tile.parameter, tile, indices, how)
    return out


def multiply(
    tiles: Sequence[Tile], x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``F.linear`` of ``x`` with a weight that has these tiles, in ``dtype``."""
    first = tiles[0].start
    out = torch.empty((*x.shape[:-1], tiles[-1].stop - first), dtype=dtype, device=x.device)
    for tile in tiles:
        rows = slice(tile.start - first, tile.stop - first)
        part = None if bias is None else bias[rows]
        out = _multiply(out, x, tile.parameter, part, tile, rows, None)
    return out


def multiply_with_one(
    tile: Tile, at: int, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``F.linear`` of ``x`` with matrix ``at`` of a tile of matrices."""
    out = torch.empty((*x.shape[:-1], tile.parameter.shape[1]), dtype=dtype, device=x.device)
    return _multiply(out, x, tile.parameter, bias, tile, slice(None), at)


class _Lookup(torch.autograd.Function):
    """Fills the places of ``out`` whose rows are in one tile."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        weight: torch.Tensor,
        tile: Tile,
        indices: torch.Tensor,
        how: Rows,
    ) -> torch.Tensor:
        places = (indices >= tile.start) & (indices < tile.stop)
        if how.fetches_all or bool(places.any()):
            out[places] = tile(_rows, indices[places] - tile.start)
        ctx.save_for_backward(indices)
        ctx.tile, ctx.how = tile, how
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        tile, how = ctx.tile, ctx.how
        size = tile.stop - tile.start

        def make() -> torch.Tensor:
            is_ours = (indices >= tile.start) & (indices < tile.stop) & (indices != how.padding)
            # A row more, for what is of other tiles, in the place of the padding, which gets none.
            local = torch.where(is_ours, indices - tile.start, size)
            rows: torch.Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, local, size + 1, size, how.scale_by_frequency
            )
            return rows[:size]

        needs_out, needs_weight, *_ = ctx.needs_input_grad
        of_weight = deferred(tile.parameter, make) if needs_weight else None
        return gradient if needs_out else None, of_weight, None, None, None


def _rows(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return F.embedding(indices, weight)


class _Product(torch.autograd.Function):
    """Fills the outputs of ``out`` that one tile computes."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tile: Tile,
        rows: slice,
        at: int | None,
    ) -> torch.Tensor:
        out[..., rows] = tile(_product, x, bias, at)
        ctx.save_for_backward(x)
        ctx.tile, ctx.rows, ctx.at = tile, rows, at
        ctx.versions = VersionsOf.of_tile(weight)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        tile, at = ctx.tile, ctx.at
        own = _flat(gradient[..., ctx.rows])
        needs_out, needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_x = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_x:
                check_unchanged(tile, ctx.versions)
                weight = tile.parameter if at is None else tile.parameter[at]
                of_x = torch.mm(own, weight.to(own.dtype).conj()).view(x.shape).to(x.dtype)
            if needs_bias:
                of_bias = own.sum(0)

        def make() -> torch.Tensor:
            with torch.autocast(gradient.device.type, enabled=False):
                return torch.mm(own.t(), _flat(x).conj().to(own.dtype)).to(tile.parameter.dtype)

        of_weight = deferred(tile.parameter, make, at) if needs_weight else None
        return gradient if needs_out else None, of_x, of_weight, of_bias, None, None, None


def _product(
    weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, at: int | None
) -> torch.Tensor:
    return F.linear(x, weight if at is None else weight[at], bias)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """As a matrix of its rows."""
    return tensor.reshape(-1, tensor.shape[-1])


def check_unchanged(tile: Tile, versions: VersionsOf) -> None:
    """Raises ``RuntimeError`` for a tile that has changed since it had those versions."""
    if not versions.are_same:
        raise RuntimeError(
            f"{tile.extra_repr()}, which is needed for the gradient, was updated by an optimizer "
            "step or changed in place after the forward pass that this backward pass belongs to; "
            "call backward before step"
        )


_lookup: Callable[..., torch.Tensor] = _Lookup.apply
_multiply: Callable[..., torch.Tensor] = _Product.apply


attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""The same, but that it does not ask again who serves it: what it calls does."""
