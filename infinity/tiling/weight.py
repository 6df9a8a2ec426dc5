"""What a module has in the place of a parameter that is in tiles: a tensor to look at, with the
shape and dtype of the whole, which the functions that modules use take tile by tile.

Whatever else is done to it is done to the whole, put together for that: in memory beside the
budget, with a warning. Inside ``gathered`` the whole is where the tiles are, and can be changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.parameters.offloaded.differentiated import PASSES
from infinity.parameters.offloaded.gradient import OffloadedGradient, read_only
from infinity.parameters.offloaded.histories import Source
from infinity.parameters.offloaded.parameter import cannot_be_copied
from infinity.parameters.offloaded.placeholders import (
    ABOUT_TILED,
    as_they_are,
    placeholder,
    refusal_of_gradient,
)
from infinity.tiling import pieces
from infinity.tiling.gradients import OF_GRADIENT, GradientOfTiles, asks_for_node
from infinity.tiling.groups import multiply_groups, selected
from infinity.tiling.tile import Tile
from infinity.tiling.wholes import (
    check_own_data,
    is_program_s,
    joined_of,
    on_wholes,
    put_rows,
    replace_data,
    with_history,
)
from swap.tiers import format_bytes

_log = logging.getLogger(__name__)


class TiledWeight(torch.Tensor):
    """Stands for the parameter that the ``tiles`` are of."""

    comes_before_weights = True
    _cut_tiles: Sequence[Tile]
    _cut_name: str
    _cut_by_ranks: bool
    _cut_was_whole: bool = False
    _cut_at: int | None = None
    """The matrix of the only tile that this is; None: all that the tiles have."""
    _cut_turned: bool = False
    """Whether the last two dimensions have changed places."""
    _cut_data: bool = False
    """Whether this has no history, whatever the tiles have."""
    _cut_is_operand: bool = False
    """Whether a function that takes it apart computes with this, and keeps no part."""

    OWN = (
        *("_cut_tiles", "_cut_name", "_cut_by_ranks", "_cut_was_whole", "_cut_owner"),
        *("_is_param", "_cut_arrivals"),
    )
    """What a parameter that has this class has beside attributes of a program's."""

    @staticmethod
    def of(
        tiles: Sequence[Tile], name: str, face: torch.Tensor, *, is_partitioned: bool
    ) -> TiledWeight:
        """``face`` has the shape, dtype and device of the whole. ``is_partitioned``: all ranks have
        to ask for the same tiles.
        """
        with as_they_are():
            weight = face.as_subclass(TiledWeight)
        weight._cut_tiles, weight._cut_name = tiles, name
        weight._cut_by_ranks = is_partitioned
        return weight

    @property
    def tiles(self) -> list[nn.Parameter]:
        """The parameters that hold the rows, in their order."""
        return [tile.parameter for tile in self._cut_tiles]

    def _rows(self) -> list[tuple[Tile, slice]]:
        """The tiles, and where their rows are in this."""
        first = self._cut_tiles[0].start
        return [(tile, slice(tile.start - first, tile.stop - first)) for tile in self._cut_tiles]

    def cut_part(
        self, tiles: Sequence[Tile], view: Callable[[torch.Tensor], torch.Tensor]
    ) -> TiledWeight:
        """A ``view`` of this, which these tiles have the values of."""
        with torch._C.DisableTorchFunctionSubclass(), as_they_are():
            face = view(self.as_subclass(torch.Tensor))
        part = TiledWeight.of(tiles, self._cut_name, face, is_partitioned=self._cut_by_ranks)
        part._cut_data = self._cut_data
        return part

    @property
    def requires_grad(self) -> bool:
        """Whether rows of it do."""
        return not self._cut_data and any(tile.requires_grad for tile in self.tiles)

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        for tile in self.tiles:
            tile.requires_grad = required

    def requires_grad_(self, requires_grad: bool = True) -> TiledWeight:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """What stands for the whole gradient, or a copy of it, to be read only, while that arrives;
        None if a tile has none, and of views.
        """
        if self._is_part:
            return None
        owner = self._gradients()
        if owner.is_there():
            first, refusal = self.tiles[0], refusal_of_gradient(self._cut_name)
            face = placeholder(self.shape, first.dtype, first.device, refusal)
            return OffloadedGradient.of(owner, 0, face)
        parts = [tile.grad for tile in self.tiles]
        if any(part is None for part in parts):
            return None
        copies = [part.clone() for part in parts if part is not None]
        return read_only(torch.cat(copies), Source(self._cut_name))

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if isinstance(gradient, OffloadedGradient) and gradient.stands_for(self._gradients(), 0):
            return gradient.becomes_it()  # ``weight.grad += x`` has changed it already
        if self._is_part:
            raise RuntimeError(
                f"a view of {self._cut_name}, which is in tiles, has no gradient of its own; "
                "assign to that of the parameter"
            )
        self._gradients().assign(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def _is_part(self) -> bool:
        return self._cut_data or self._cut_at is not None or self._cut_turned

    def cut_by_tiles(self) -> TiledWeight:
        """The same for a computation, which keeps no part of it."""
        same = self.cut_part(self._cut_tiles, lambda face: face)
        same._cut_at, same._cut_turned = self._cut_at, self._cut_turned
        same._cut_is_operand = True
        return same

    def _gradients(self) -> GradientOfTiles:
        owner = GradientOfTiles(self._cut_tiles, self._cut_name)
        found: GradientOfTiles = vars(self).setdefault("_cut_owner", owner)
        return found

    @property
    def data(self) -> torch.Tensor:
        """The same without history: the memory itself where that is the program's to change."""
        if all(map(is_program_s, self.tiles)):
            with torch.no_grad():
                return self.cut_whole().detach()  # which can be given history, as a view cannot
        data = self.cut_part(self._cut_tiles, torch.Tensor.detach)
        data._cut_at, data._cut_turned = self._cut_at, self._cut_turned
        data._cut_data = True
        return data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if isinstance(data, TiledWeight) and data._cut_data and data._cut_tiles is self._cut_tiles:
            return check_own_data(self._cut_tiles, self._cut_name)  # ``weight.data += x`` did it
        replace_data(self._rows(), self._cut_name, self, data, is_view=self._is_part)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"TiledWeight({self._cut_name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"tiles={len(self._cut_tiles)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_GRADIENT or func in PASSES or asks_for_node(func, args):
            _refuse_gradient(args, kwargs)
        served = None if _is_cut_off(args, kwargs) else _SERVED.get(func)
        result = served(*args, **kwargs) if served is not None else NotImplemented
        if result is not NotImplemented:
            return result
        if func in ABOUT_TILED or getattr(func, "__self__", None) in ABOUT_TILED:
            with torch._C.DisableTorchFunctionSubclass(), as_they_are():
                return func(*args, **kwargs)
        return _on_whole(func, args, kwargs)

    def cut_whole(self) -> torch.Tensor:
        """All rows: where they are if they lie together, or put together anew."""
        if torch.is_grad_enabled() and self.requires_grad:
            whole = with_history(self.tiles)
        else:
            whole = joined_of(self.tiles)
        whole = whole if self._cut_at is None else whole[self._cut_at]
        return whole.transpose(-2, -1) if self._cut_turned else whole

    @torch.no_grad()
    def cut_bring_back(self, whole: torch.Tensor) -> None:
        """Let the tiles have the values of ``whole``, which ``cut_whole()`` gave."""
        if self._cut_turned:
            whole = whole.transpose(-2, -1)
        if self._cut_at is not None:
            if whole.data_ptr() != self.tiles[0][self._cut_at].data_ptr():
                self.tiles[0][self._cut_at] = whole
            return
        put_rows(self._rows(), whole)

    def cut_note_whole(self) -> None:
        """Warn, once."""
        if not self._cut_was_whole and not all(map(is_program_s, self.tiles)):
            self._cut_was_whole = True
            _log.warning(
                "%s is in tiles and is used as a whole, which takes %s beside the budget: tile by "
                "tile it is taken by F.embedding, F.linear, F.multi_head_attention_forward and "
                "F.grouped_mm alone",
                self._cut_name,
                format_bytes(self.numel() * self.dtype.itemsize),
            )


def _refuse_gradient(args: Any, kwargs: Any) -> NoReturn:
    weight = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, TiledWeight))
    raise RuntimeError(
        f"{weight._cut_name} is in tiles while the model is offloaded, and its gradient arrives "
        "tile by tile; have hooks on the tiles, and differentiate by them, as model.parameters() "
        "gives them in the block"
    )


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of whole weights; what it changed of them is brought to the tiles."""
    found = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, TiledWeight)}
    for weight in found.values():
        weight.cut_note_whole()
    return on_wholes(func, args, kwargs, found)


def _is_cut_off(args: Any, kwargs: Any) -> bool:
    """Whether there is one without history, while the tiles would be given some."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, TiledWeight) and x._cut_data for x in (*args, *kwargs.values()))


# The functions that take it tile by tile.


def _is_operand(x: Any) -> bool:
    return pieces.is_usual(x) and not isinstance(x, TiledWeight)


def _embedding(
    input: torch.Tensor,  # noqa: A002  as F.embedding has it
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, TiledWeight) or not _is_operand(input):
        return NotImplemented
    rows = weight.shape[0]
    is_taken = pieces.takes_indices(input, padding_idx, rows)
    if not is_taken or max_norm is not None or sparse or weight._cut_tiles[0].start:
        return NotImplemented
    if input.numel() and (int(input.min()) < 0 or int(input.max()) >= rows):
        raise IndexError(f"index out of range in self: {weight._cut_name} has {rows} rows")
    padding = -1 if padding_idx is None else padding_idx % rows
    how = pieces.Rows(padding, scale_grad_by_freq, fetches_all=weight._cut_by_ranks)
    return pieces.look_up(weight._cut_tiles, input, how)


def _linear(
    input: torch.Tensor,  # noqa: A002  as F.linear has it
    weight: Any,
    bias: torch.Tensor | None = None,
) -> Any:
    if not isinstance(weight, TiledWeight) or not _is_operand(input):
        return NotImplemented
    if isinstance(bias, TiledWeight) or weight.dim() != 2 or weight._cut_turned:
        return NotImplemented
    if bias is not None and bias.shape != weight.shape[:1]:
        return NotImplemented  # broadcast, or refused, by torch
    kind = input.device.type
    is_cast = input.dtype.is_floating_point and input.dtype != torch.float64  # by torch itself
    autocast = torch.is_autocast_enabled(kind) and is_cast
    dtype = torch.get_autocast_dtype(kind) if autocast else input.dtype
    if weight._cut_at is not None:
        return pieces.multiply_with_one(weight._cut_tiles[0], weight._cut_at, input, bias, dtype)
    return pieces.multiply(weight._cut_tiles, input, bias, dtype)


def _split(weight: Any, split_size: int | Sequence[int], dim: int = 0) -> Any:
    """Where it comes to whole tiles, and all that is taken is computed with."""
    if dim != 0 or not isinstance(weight, TiledWeight) or not weight._cut_is_operand:
        return NotImplemented
    rows = weight.shape[0]
    if isinstance(split_size, int):
        split_size = [min(split_size, rows - start) for start in range(0, rows, split_size)]
    parts, left = [], [*weight._cut_tiles]
    for size in split_size:
        taken: list[Tile] = []
        while left and sum(tile.stop - tile.start for tile in taken) < size:
            taken.append(left.pop(0))
        if sum(tile.stop - tile.start for tile in taken) != size:
            return NotImplemented
        parts.append(weight.cut_part(taken, lambda face, size=size: face[:size]))  # type: ignore[misc]
    return tuple(parts) if not left else NotImplemented


def _chunk(weight: Any, chunks: int, dim: int = 0) -> Any:
    return _split(weight, -(-weight.shape[0] // chunks), dim)


def _select(weight: Any, index: Any) -> Any:
    """A matrix of a stack, where the module computes that gives the others gradients of zeros."""
    is_one = isinstance(index, int) or (
        isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype != torch.bool
    )
    if not is_one or not isinstance(weight, TiledWeight) or id(weight) not in selected():
        return NotImplemented
    if weight.dim() != 3 or not -len(weight) <= int(index) < len(weight):
        return NotImplemented
    index = int(index) % len(weight)
    selected()[id(weight)] = True
    (tile,) = (tile for tile, rows in weight._rows() if rows.start <= index < rows.stop)
    matrix = weight.cut_part([tile], lambda face: face[0])
    matrix._cut_at = index - (tile.start - weight._cut_tiles[0].start)
    return matrix


def _transpose(weight: Any, first: int, second: int) -> Any:
    if not isinstance(weight, TiledWeight) or weight.dim() != 3 or {first, second} != {-2, -1}:
        return NotImplemented
    if all(map(is_program_s, weight.tiles)) and id(weight) not in selected():
        return NotImplemented  # a view of memory
    transposed = weight.cut_part(weight._cut_tiles, lambda face: face.transpose(-2, -1))
    transposed._cut_turned = not weight._cut_turned
    return transposed


def _grouped(
    x: Any,
    weight: Any,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    is_ours = isinstance(weight, TiledWeight) and _is_operand(x)
    if not is_ours or x.dim() != 2 or offs is None or bias is not None or out_dtype is not None:
        return NotImplemented
    return multiply_groups(
        weight._cut_tiles,
        x,
        offs,
        is_transposed=weight._cut_turned,
        fetches_all=weight._cut_by_ranks,
    )


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Tile by tile also where parts are views: the bits are those of everywhere."""
    args, kwargs = tree_map_only(TiledWeight, TiledWeight.cut_by_tiles, (args, kwargs))
    return pieces.attention(*args, **kwargs)


_SERVED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.linear: _linear,
    F.multi_head_attention_forward: _attention,
    torch.Tensor.split: _split,
    torch.Tensor.chunk: _chunk,
    torch.Tensor.__getitem__: _select,
    torch.Tensor.transpose: _transpose,
    torch._grouped_mm: _grouped,
}
