"""Large parameters in tiles inside an offload block, themselves again after it.

A parameter is cut where it is, see ``cut_weights``: its tiles have its memory, and it stands for
them, empty-handed. On the way out the same modules have the same parameters, with the values of the
tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from types import TracebackType

import torch
from torch import nn

from infinity.parameters.compiled import compiled_blocks
from infinity.parameters.first_values import StoredValues, Values
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS, Record, compute_dtype_of
from infinity.tiling.cut_weights import CutWeight
from infinity.tiling.cuttable import Owner, reason_against, summed_with_adapters, whole_parts_of
from infinity.tiling.tiled_linear import TiledLinear, rows_of, tiles_within
from swap.tiers import format_bytes

MIN_TILE_BYTES = 4 * ALWAYS_ON_HOST_ELEMENTS * torch.float32.itemsize
"""Least bound: near-equal tiles within it are larger than what always stays in memory."""

_log = logging.getLogger(__name__)


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
        self._cuts: list[CutWeight] = []
        layers = (module for module in model.modules() if isinstance(module, TiledLinear))
        self._tiles = {id(tile) for layer in layers for tile in layer.tiles}
        self._compiled = {inner for block in compiled_blocks(model) for inner in block.modules()}
        self._summed = summed_with_adapters(model)
        self._chosen = self._choose(max_parameter_bytes)

    def __enter__(self) -> Tiling:
        for make in self._chosen:
            cut = make()
            self._cuts.append(cut)
            cut.replace()
            cut.hand_over()
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
            if self._cuts[-1].is_absent or _has_any(self._cuts[-1], missing):
                _log.warning(
                    "%s stays in tiles: some of its values could not be read, or are those from "
                    "before the last step",
                    self._cuts[-1].name,
                )
            else:
                self._cuts[-1].give_back()
            self._cuts.pop()

    def values(self, values: Values, records: Sequence[Record]) -> Values:
        """``values``, of the model as it was, for the ``records`` of the tiled model."""
        return _TiledValues(values, self._records, records, self._cuts)

    def _choose(self, bound: int) -> list[Callable[[], CutWeight]]:
        """What makes the cuts."""
        owners = _owners(self._model)
        chosen: list[Callable[[], CutWeight]] = []
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
        if any(id(tile) in self._tiles for _, tile, _ in owners):
            return "a tile of a TiledLinear, which is cut once: make that of more tiles"
        if any(owner in self._compiled for _, owner, _ in owners):
            return "in a compiled block, which computes from all of its weights at once"
        if any((owner, own) in self._summed for _, owner, own in owners):
            return "with an adapter of target_parameters, which is added to all of it in each pass"
        return reason_against(owners, parameter, is_partitioned=self._is_partitioned)

    def _cut_of(
        self, record: Record, owners: Sequence[Owner], bound: int
    ) -> Callable[[], CutWeight]:
        dtype = compute_dtype_of(record.dtype, self._compute_dtype)
        rows = record.shape[0]
        row_bytes = record.numel // rows * dtype.itemsize
        if len(record.shape) == 3:
            bound = max(bound, row_bytes)  # an expert is not cut
        num_tiles = tiles_within(rows, row_bytes, bound)
        parts = whole_parts_of(owners)
        num_tiles = -(-num_tiles // parts) * parts
        # In their order before any is cut.
        placed = [(owner, list(owner[1]._parameters)) for owner in owners]
        return lambda: CutWeight(
            placed,
            rows_of(rows, num_tiles),
            dtype,
            self._device or record.device,
            stride=record.stride,
            is_partitioned=self._is_partitioned,
        )


def _has_any(cut: CutWeight, tiles: Set[int]) -> bool:
    """Whether one of these, by their ``id``, is a tile of this cut."""
    return any(id(tile.parameter) in tiles for tile in cut.tiles)


def _owners(model: nn.Module) -> dict[int, list[Owner]]:
    """The distinct modules that have each parameter, with a name of theirs."""
    owners: dict[int, list[Owner]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module, own))
    return owners


class _TiledValues:
    """Values for tiles: rows of what they are of."""

    def __init__(
        self,
        values: Values,
        plain: Sequence[Record],
        tiled: Sequence[Record],
        cuts: Sequence[CutWeight],
    ) -> None:
        self._values = values
        self._plain = plain
        self._records = {id(record.parameter): record for record in tiled}
        self._tiles = {id(cut.parameter): cut.tiles for cut in cuts}

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        for record, tensor in self._values.parameters(self._plain):
            tiles = self._tiles.get(id(record.parameter))
            if tiles is None:
                yield self._records[id(record.parameter)], tensor
                continue
            for tile in tiles:
                # The parameter itself is empty-handed: its own values are with the tiles.
                own = tensor is record.parameter
                rows = tile.parameter if own else tensor[tile.start : tile.stop]
                yield self._records[id(tile.parameter)], rows

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._values.buffer(name, buffer)
