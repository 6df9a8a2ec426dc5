"""Large ``nn.Linear`` layers as ``TiledLinear`` inside an offload block, themselves again after it.

The layer that is tiled leaves the model for the time of the block, its parameters empty-handed: the
tiles have its memory. On the way out it comes back, the same module with the same parameters, and
has the tiles' values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.parameters.first_values import StoredValues, Values
from infinity.parameters.parameter import placeholder
from infinity.parameters.records import RESIDENT_ELEMENTS, Record, compute_dtype_of
from infinity.tiling.belongings import cut_gradient, give_back, reason_against, share
from infinity.tiling.tiled_linear import RowRange, TiledLinear, tiles_within
from swap.tiers import format_bytes

MIN_TILE_BYTES = 4 * RESIDENT_ELEMENTS * torch.float32.itemsize
"""Least bound: near-equal tiles within it are larger than what always stays in memory."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Joining:
    """``whole`` has the rows of so many tiles."""

    whole: Any
    num_tiles: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Tiled:
    """A layer, what stands for it, and where: modules with the name that they have for it."""

    name: str
    linear: nn.Linear
    tiled: TiledLinear
    places: list[tuple[nn.Module, str]]
    joined: dict[int, _Joining] = field(default_factory=dict)
    """By the parameter's ``id``, on the way out."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those that parameters came with, likewise."""

    @property
    def is_absent(self) -> bool:
        """Whether tiles have no values that the layer should have."""
        return any(
            tile.is_meta and not parameter.is_meta
            for parameter, tiles in self.pairs()
            for tile, _ in tiles
        )

    def pairs(self) -> Iterator[tuple[Any, list[tuple[Any, RowRange]]]]:
        """Each parameter of the layer with its tiles and their rows."""
        rows = self.tiled.rows()
        yield self.linear.weight, [(tile.weight, range_) for tile, range_ in rows]
        if self.linear.bias is not None:
            yield self.linear.bias, [(tile.bias, range_) for tile, range_ in rows]


class Tiling:
    """Context manager: no weight of an ``nn.Linear`` in ``model`` has more than
    ``max_parameter_bytes`` in the compute dtype inside.

    Left whole, with one warning that says why, is every other parameter that is larger: one that is
    tied, or belongs to a subclass of ``nn.Linear`` or to another kind of module. Raises
    ``ValueError`` for a bound that is less than one row of a weight, before anything is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        records: Sequence[Record],
        max_parameter_bytes: int,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self._model = model
        self._records = records
        self._compute_dtype = compute_dtype
        self._layers: list[_Tiled] = []
        self._strides = {id(record.parameter): record.stride for record in records}
        self._chosen = self._choose(max_parameter_bytes)

    def __enter__(self) -> Tiling:
        for name, linear, tiles in self._chosen:
            self._replace(name, linear, tiles)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._layers:
            if not self._layers[-1].joined and self._layers[-1].is_absent:
                _log.warning(
                    "%s stays a TiledLinear: some of its values could not be read",
                    self._layers[-1].name,
                )
            else:
                _give_back(self._layers[-1], self._strides)
            self._layers.pop()

    def values(self, values: Values, records: Sequence[Record]) -> Values:
        """``values``, of the model as it was, for the ``records`` of the tiled model."""
        return _TiledValues(values, self._records, records, self._layers)

    def _choose(self, bound: int) -> list[tuple[str, nn.Linear, int]]:
        """Layers to be tiled, with the number of tiles."""
        owners = _owners(self._model)
        chosen, whole = [], []
        for record in self._records:
            if record.spec.weight_bytes <= bound:
                continue
            reason = self._reason_against(owners[id(record.parameter)], record.parameter)
            if reason is not None:
                whole.append(f"{record.name} ({format_bytes(record.spec.weight_bytes)}, {reason})")
                continue
            ((name, linear),) = owners[id(record.parameter)]
            assert isinstance(linear, nn.Linear)
            dtype = compute_dtype_of(linear.weight.dtype, self._compute_dtype)
            row_bytes = linear.in_features * dtype.itemsize
            chosen.append((name, linear, tiles_within(linear.out_features, row_bytes, bound)))
        if whole:
            _log.warning(
                "larger than max_parameter_bytes=%d, and not tiled: %s; at least one of these is "
                "in memory as a whole while it computes",
                bound,
                "; ".join(whole),
            )
        return chosen

    def _reason_against(
        self, owners: list[tuple[str, nn.Module]], parameter: nn.Parameter
    ) -> str | None:
        """Why the parameter cannot be tiled; None if it can."""
        if len(owners) > 1:
            return f"tied: {' and '.join(name for name, _ in owners)} share it"
        (_, module), *_ = owners
        if type(module) is not nn.Linear:
            return f"of a {type(module).__name__}, which is not nn.Linear itself"
        if type(parameter) is not nn.Parameter:
            return f"a {type(parameter).__name__}, which is not nn.Parameter itself"
        if parameter is not module.weight:
            return "a bias"
        if module is self._model:
            return "of the model itself, which nothing can take the place of"
        return reason_against(module)

    def _replace(self, name: str, linear: nn.Linear, tiles: int) -> None:
        tiled = TiledLinear.cut(linear, tiles)
        places = [
            (parent, child)
            for parent in self._model.modules()
            for child, module in parent._modules.items()
            if module is linear
        ]
        layer = _Tiled(name, linear, tiled, places)
        self._layers.append(layer)
        share(linear, tiled)
        for parent, child in places:
            parent._modules[child] = tiled
        for parameter, rows in layer.pairs():
            if parameter.grad is not None:
                layer.gradients[id(parameter)] = parameter.grad
                cut_gradient(parameter.grad, parameter, rows)
            if not parameter.is_meta:
                parameter.data = placeholder(parameter.shape, parameter.dtype, parameter.device)
        linear.forward = _refuse(name)  # type: ignore[method-assign]


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """The distinct modules that have each parameter, with a name of theirs."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    return owners


def _refuse(name: str) -> Callable[..., Any]:
    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{name} is a TiledLinear while the model is offloaded; reach it through the model, "
            "not through a reference from before the block"
        )

    return forward


def _give_back(layer: _Tiled, strides: Mapping[int, Sequence[int] | None]) -> None:
    """The layer returns to its places with what its tiles hold; those are emptied one by one. Can
    be called again after an interrupt.
    """
    for parameter, tiles in layer.pairs():
        parameter.requires_grad_(any(tile.requires_grad for tile, _ in tiles))
        if any(tile.grad is not None for tile, _ in tiles):  # nothing has used it
            parameter.grad = layer.gradients.get(id(parameter))
        if parameter.is_meta:
            continue
        if id(parameter) not in layer.joined:
            layer.joined[id(parameter)] = _joining(
                parameter.shape, strides[id(parameter)], [tile for tile, _ in tiles]
            )
        joining = layer.joined[id(parameter)]
        for tile, (start, stop) in tiles[joining.num_tiles :]:
            joining.whole[start:stop].copy_(tile.detach())
            joining.num_tiles += 1
            tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
        parameter.data = joining.whole
    layer.linear.__dict__.pop("forward", None)
    layer.linear.train(layer.tiled.training)
    give_back(layer.linear, layer.tiled)
    for parent, child in layer.places:
        parent._modules[child] = layer.linear


def _joining(
    shape: torch.Size, stride: Sequence[int] | None, tiles: Sequence[torch.Tensor]
) -> _Joining:
    """The tiles as one: where they lie if they were never offloaded, or new memory for them of that
    ``stride`` (None: contiguous).
    """
    first = tiles[0].detach()
    if _lie_as_cut(tiles):
        whole = first.as_strided(shape, first.stride(), first.storage_offset())
        return _Joining(whole, num_tiles=len(tiles))
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    whole = torch.empty_strided(shape, stride, dtype=first.dtype, device=first.device)
    return _Joining(whole)


def _lie_as_cut(tiles: Sequence[torch.Tensor]) -> bool:
    """Whether they are rows of one tensor still, the next behind the last."""
    kind = _memory_of(tiles[0])
    at = tiles[0].storage_offset()
    for tile in tiles:
        if _memory_of(tile) != kind or tile.storage_offset() != at:
            return False
        at += tile.shape[0] * tile.stride(0)
    return True


def _memory_of(tile: torch.Tensor) -> tuple[object, ...]:
    """Where and how its elements lie, but for where they begin."""
    where = tile.untyped_storage()._cdata
    return where, tile.stride(), tile.dtype, tile.is_neg(), tile.is_conj()


class _TiledValues:
    """Values for the tiles of a layer: its rows."""

    def __init__(
        self,
        values: Values,
        plain: Sequence[Record],
        tiled: Sequence[Record],
        layers: Sequence[_Tiled],
    ) -> None:
        self._values = values
        self._plain = plain
        self._records = {id(record.parameter): record for record in tiled}
        self._tiles = {
            id(parameter): tiles for layer in layers for parameter, tiles in layer.pairs()
        }

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        for record, tensor in self._values.parameters(self._plain):
            tiles = self._tiles.get(id(record.parameter))
            if tiles is None:
                yield self._records[id(record.parameter)], tensor
                continue
            for tile, (start, stop) in tiles:
                # The layer itself is empty-handed: its own values are with the tiles.
                own = tensor is record.parameter
                yield self._records[id(tile)], tile if own else tensor[start:stop]

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._values.buffer(name, buffer)
