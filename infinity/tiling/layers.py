"""Large parameters in tiles inside an offload block, themselves again after it.

A plain ``nn.Linear`` becomes a ``TiledLinear``: the layer leaves the model for the time of the
block, its parameters empty-handed, because the tiles have its memory. A parameter of another
module, or of several, is cut where it is, see ``cut_weights``. On the way out the same modules have
the same parameters, with the tiles' values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.parameters.compiled import compiled_blocks
from infinity.parameters.first_values import StoredValues, Values
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS, Record, compute_dtype_of
from infinity.tiling import cut_weights
from infinity.tiling.belongings import give_back, reason_against, share
from infinity.tiling.cut_weights import CutWeight, Owner
from infinity.tiling.joining import Cut, StateDictHooks
from infinity.tiling.tile import RowRange, Tile
from infinity.tiling.tiled_linear import TiledLinear, tiles_within
from infinity.tiling.wholes import kept_whole_of
from swap.tiers import format_bytes

MIN_TILE_BYTES = 4 * ALWAYS_ON_HOST_ELEMENTS * torch.float32.itemsize
"""Least bound: near-equal tiles within it are larger than what always stays in memory."""

_log = logging.getLogger(__name__)


class _TiledLayer(Cut):
    """A layer, what stands for it, and where: modules with the name that they have for it."""

    def __init__(self, name: str, linear: nn.Linear, tiles: int, model: nn.Module) -> None:
        super().__init__(name)
        self._linear = linear
        self._tiled = TiledLinear.cut(linear, tiles)
        wholes = {"weight": self._whole_of_weights}
        if self._tiled.has_bias:
            wholes["bias"] = self._whole_of_biases
        self._hooks = StateDictHooks(self._tiled, wholes)
        self._places = [
            (parent, child)
            for parent in model.modules()
            for child, module in parent._modules.items()
            if module is linear
        ]

    def pairs(self) -> Iterator[tuple[Any, list[tuple[Any, RowRange]]]]:
        rows = self._tiled.rows()
        yield self._linear.weight, [(tile.weight, range_) for tile, range_ in rows]
        if self._linear.bias is not None:
            yield self._linear.bias, [(tile.bias, range_) for tile, range_ in rows]

    def standing(self) -> Iterator[tuple[Any, str, list[Tile]]]:
        for (parameter, rows), own in zip(self.pairs(), ("weight", "bias"), strict=False):
            tiles = [Tile(own, tile, range_) for tile, range_ in rows]
            yield parameter, f"{self.name}.{own}" if self.name else own, tiles

    def replace(self) -> None:
        share(self._linear, self._tiled)
        self._hooks.attach()
        for parent, child in self._places:
            parent._modules[child] = self._tiled
        self._linear.forward = _refuse(self.name)  # type: ignore[method-assign]

    def hand_over(
        self, dtype: torch.dtype | None, device: torch.device | None, *, is_partitioned: bool
    ) -> None:
        super().hand_over(dtype, device, is_partitioned=is_partitioned)
        for parameter, name, tiles in self.standing():
            face: Any = parameter
            if parameter.is_meta:  # and is to stay so
                own = compute_dtype_of(parameter.dtype, dtype)
                place = device or parameter.device
                face = cut_weights.weight_of(
                    tiles, name, parameter, own, place, is_partitioned=is_partitioned
                )
            self._tiled.faces[tiles[0].name] = face

    def _whole_of_weights(self) -> torch.Tensor:
        return kept_whole_of([tile.weight for tile, _ in self._tiled.rows()])

    def _whole_of_biases(self) -> torch.Tensor:
        return kept_whole_of([tile.bias for tile, _ in self._tiled.rows()])

    def restore(self) -> None:
        self._hooks.detach()
        self._linear.__dict__.pop("forward", None)
        self._tiled.faces.clear()
        self._linear.train(self._tiled.training)
        give_back(self._linear, self._tiled)
        for parent, child in self._places:
            parent._modules[child] = self._linear


class Tiling:
    """Context manager: no parameter that a tile can be made of has more than
    ``max_parameter_bytes`` in the compute dtype inside.

    Those are the weights of ``nn.Linear``, ``nn.Embedding`` and ``nn.MultiheadAttention``, also if
    several of them share one, and of experts of transformers, none of which is cut itself.
    Left whole, with one warning that says why, is every other parameter that is larger. Raises
    ``ValueError`` for a bound that is less than one row of a weight, before anything is changed.
    ``device``: where weights are computed with; None: where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        records: Sequence[Record],
        max_parameter_bytes: int,
        compute_dtype: torch.dtype | None,
        *,
        device: torch.device | None = None,
        is_partitioned: bool = False,
    ) -> None:
        self._model = model
        self._records = records
        self._compute_dtype = compute_dtype
        self._device = device
        self._is_partitioned = is_partitioned
        self._cuts: list[Cut] = []
        self._strides = {id(record.parameter): record.stride for record in records}
        layers = (module for module in model.modules() if isinstance(module, TiledLinear))
        self._tiles = {id(tile) for layer in layers for tile in layer.tiles}
        self._compiled = {inner for block in compiled_blocks(model) for inner in block.modules()}
        self._chosen = self._choose(max_parameter_bytes)

    def __enter__(self) -> Tiling:
        for make in self._chosen:
            cut = make()
            self._cuts.append(cut)
            cut.replace()
            cut.hand_over(self._compute_dtype, self._device, is_partitioned=self._is_partitioned)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What a RestoreError on its way has yet to give back, in retry(), it gives to the tiles.
        missing = {id(parameter) for parameter in getattr(error, "_lost", tuple)()}
        while self._cuts:
            if self._cuts[-1].is_absent or self._cuts[-1].has_any(missing):
                _log.warning(
                    "%s stays in tiles: some of its values could not be read, or are those from "
                    "before the last step",
                    self._cuts[-1].name,
                )
            else:
                self._cuts[-1].give_back(self._strides)
            self._cuts.pop()

    def values(self, values: Values, records: Sequence[Record]) -> Values:
        """``values``, of the model as it was, for the ``records`` of the tiled model."""
        return _TiledValues(values, self._records, records, self._cuts)

    def _choose(self, bound: int) -> list[Callable[[], Cut]]:
        """What makes the cuts."""
        owners = _owners(self._model)
        chosen: list[Callable[[], Cut]] = []
        whole = []
        for record in self._records:
            if record.spec.weight_bytes <= bound:
                continue
            reason = self._reason_against(owners[id(record.parameter)], record.parameter)
            if reason is None:
                chosen.append(self._cut_of(record, owners[id(record.parameter)], bound))
            else:
                whole.append(f"{record.name} ({format_bytes(record.spec.weight_bytes)}, {reason})")
        if whole:
            _log.warning(
                "larger than max_parameter_bytes=%d, and not tiled: %s; at least one of these is "
                "in memory as a whole while it computes",
                bound,
                "; ".join(whole),
            )
        return chosen

    def _reason_against(self, owners: Sequence[Owner], parameter: nn.Parameter) -> str | None:
        """Why the parameter cannot be tiled; None if it can."""
        (_, module, own), *_ = owners
        if any(id(tile) in self._tiles for _, tile, _ in owners):
            return "a tile of a TiledLinear, which is cut once: make that of more tiles"
        if any(owner in self._compiled for _, owner, _ in owners):
            return "in a compiled block, which computes from all of its weights at once"
        if not self._is_layer(owners):
            return cut_weights.reason_against(
                owners, parameter, is_partitioned=self._is_partitioned
            )
        if type(parameter) is not nn.Parameter:
            return f"a {type(parameter).__name__}, which is not nn.Parameter itself"
        if own != "weight":
            return f"the {own} of {type(module).__name__}, which is cut by its weight alone"
        layer: Any = module
        return reason_against(layer)

    def _is_layer(self, owners: Sequence[Owner]) -> bool:
        """Whether a ``TiledLinear`` takes the place of the module; the model itself has none."""
        (_, module, _), *others = owners
        return not others and type(module) is nn.Linear and module is not self._model

    def _cut_of(self, record: Record, owners: Sequence[Owner], bound: int) -> Callable[[], Cut]:
        (name, module, _), *_ = owners
        dtype = compute_dtype_of(record.dtype, self._compute_dtype)
        rows = record.shape[0]
        row_bytes = record.numel // rows * dtype.itemsize
        if len(record.shape) == 3:
            bound = max(bound, row_bytes)  # an expert is not cut
        num_tiles = tiles_within(rows, row_bytes, bound)
        parts = cut_weights.whole_parts_of(owners)
        num_tiles = -(-num_tiles // parts) * parts
        if self._is_layer(owners):
            layer: Any = module
            return lambda: _TiledLayer(name, layer, num_tiles, self._model)
        return lambda: CutWeight(
            owners,
            num_tiles,
            dtype,
            self._device or record.device,
            is_partitioned=self._is_partitioned,
        )


def _owners(model: nn.Module) -> dict[int, list[Owner]]:
    """The distinct modules that have each parameter, with a name of theirs."""
    owners: dict[int, list[Owner]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module, own))
    return owners


def _refuse(name: str) -> Callable[..., Any]:
    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{name} is a TiledLinear while the model is offloaded; reach it through the model, "
            "not through a reference from before the block"
        )

    return forward


class _TiledValues:
    """Values for tiles: rows of what they are of."""

    def __init__(
        self,
        values: Values,
        plain: Sequence[Record],
        tiled: Sequence[Record],
        cuts: Sequence[Cut],
    ) -> None:
        self._values = values
        self._plain = plain
        self._records = {id(record.parameter): record for record in tiled}
        self._tiles = {id(parameter): tiles for cut in cuts for parameter, tiles in cut.pairs()}

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
