"""Large parameters in tiles inside an offload block, themselves again after it.

A parameter is cut where it is, see ``cut_weights``: its tiles have its memory, and it stands for
them, empty-handed. On the way out the same modules have the same parameters, with the values of the
tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from infinity.parameters.compiled import compiled_blocks
from infinity.parameters.first_values import StoredValues, Values
from infinity.parameters.offloaded.placeholders import is_lost
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS, Record, compute_dtype_of
from infinity.tiling.cut_weights import CutWeight
from infinity.tiling.tile import CHILD, Owner, WalksOverWholes
from infinity.tiling.tiled_linear import TiledLinear, rows_of, tiles_within
from swap.tiers import format_bytes

MIN_TILE_BYTES = 4 * ALWAYS_ON_HOST_ELEMENTS * torch.float32.itemsize
"""Least bound: near-equal tiles within it are larger than what always stays in memory."""

_log = logging.getLogger(__name__)
_PACKED = "in_proj_weight"
_PROJECTIONS = (_PACKED, "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Of ``nn.MultiheadAttention``; the first has those of query, key and value."""
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Stacks of matrices, of what transformers calls experts."""


class Tiling:
    """Context manager: no parameter that a tile can be made of has more than
    ``max_parameter_bytes`` in the compute dtype inside.

    Those are the weights of ``nn.Linear``, ``nn.Embedding`` and ``nn.MultiheadAttention``, also if
    several of them share one, and of experts of transformers, none of which is cut itself.
    Left whole, with one warning that says why, is every other parameter that is larger. Raises
    ``ValueError`` for a bound that is less than one row of a weight, before anything is changed.
    ``device``: where weights are computed with; None: where they are. ``claim`` is given the tiles
    before the model has them, so that they are of no other block that begins meanwhile.
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
        claim: Callable[[Iterable[tuple[str, nn.Parameter]]], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._claim = claim
        self._records = records
        self._compute_dtype = compute_dtype
        self._device = device
        self._is_partitioned = is_partitioned
        self._cuts: list[CutWeight] = []
        self._walks = WalksOverWholes(model)
        layers = (module for module in model.modules() if isinstance(module, TiledLinear))
        self._tiles = {id(tile) for layer in layers for tile in layer.tiles}
        self._compiled = {inner for block in compiled_blocks(model) for inner in block.modules()}
        self._summed = _summed_with_adapters(model)
        self._chosen = self._choose(max_parameter_bytes)

    def __enter__(self) -> Tiling:
        for make in self._chosen:
            cut = make()
            self._cuts.append(cut)
            self._claim((cut.name, tile.parameter) for tile in cut.tiles)
            cut.replace()
            cut.hand_over()
        self._walks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._walks.__exit__(kind, error, trace)
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
        return _reason_against(owners, parameter, is_partitioned=self._is_partitioned)

    def _cut_of(
        self, record: Record, owners: Sequence[Owner], bound: int
    ) -> Callable[[], CutWeight]:
        dtype = compute_dtype_of(record.dtype, self._compute_dtype)
        rows = record.shape[0]
        row_bytes = record.numel // rows * dtype.itemsize
        if len(record.shape) == 3:
            bound = max(bound, row_bytes)  # an expert is not cut
        num_tiles = tiles_within(rows, row_bytes, bound)
        parts = _whole_parts_of(owners)
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


# Which parameters can be in tiles.


def _summed_with_adapters(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """The parameters, by module and name, in whose place PEFT puts the sum of them and an adapter
    while the module computes (``target_parameters``).
    """
    wrappers: list[Any] = [m for m in model.modules() if hasattr(m, "get_base_layer")]
    return {
        (wrapper.get_base_layer(), wrapper.parameter_name)
        for wrapper in wrappers
        if isinstance(getattr(wrapper, "parameter_name", None), str)
    }


def _reason_against(
    owners: Sequence[Owner], parameter: nn.Parameter, *, is_partitioned: bool
) -> str | None:
    """Why the parameter cannot be cut where it is; None if it can."""
    for name, module, own in owners:
        reason = _reason_against_use(module, own, is_partitioned=is_partitioned)
        if reason is not None:
            names = " and ".join(name for name, *_ in owners)
            tied = f"tied: {names} share it, and {name} is {reason}"
            return tied if len(owners) > 1 else f"of {reason}"
    if type(parameter) is not nn.Parameter:
        return f"a {type(parameter).__name__}, which is not nn.Parameter itself"
    return _reason_against_parameter(parameter)


def _reason_against_use(module: nn.Module, own: str, *, is_partitioned: bool) -> str | None:
    """What kind of module cannot do with tiles in the place of its parameter ``own``."""
    kind = type(module).__name__
    what = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    if "forward" in vars(module):
        return f"{what} with a forward of its own"
    if hasattr(module, CHILD):
        return f"{what} that has something called {CHILD!r}"
    if isinstance(module, nn.Embedding) and own == "weight":
        if module.max_norm is not None:
            return f"{what} with max_norm, which changes rows as it looks them up"
        return f"{what} with sparse=True" if module.sparse else None
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
        return None if own == "weight" else f"{what}, which is cut by its weight alone"
    if type(module) is nn.MultiheadAttention and own in _PROJECTIONS:
        return None
    if own in _OF_EXPERTS and {"has_gate", "is_transposed", "config"} <= vars(module).keys():
        how = getattr(module.config, "_experts_implementation", None)
        by_one = how == "eager" or how is None
        if how == "grouped_mm" or (by_one and not is_partitioned and not module.is_transposed):
            return None
        where = " over ranks" if by_one and is_partitioned else ""
        return f"{what} with experts_implementation={how!r}{where}"
    return f"{what}, which is none of nn.Linear, nn.Embedding and nn.MultiheadAttention"


def _reason_against_parameter(parameter: torch.Tensor) -> str | None:
    """What ``parameter`` has that cannot be cut with it."""
    if is_lost(parameter):
        return "a parameter that lost its values in an earlier block"
    hooked: Any = parameter
    if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
        return "a parameter with hooks"
    gradient = parameter.grad
    if gradient is not None and (
        gradient.layout != torch.strided or gradient.dtype != parameter.dtype
    ):
        return "a parameter with a gradient that is sparse or of another dtype"
    return None


def _whole_parts_of(owners: Sequence[Owner]) -> int:
    """The number of tiles is a multiple of this, so that what a module takes apart are tiles."""
    packed = any(type(m) is nn.MultiheadAttention and own == _PACKED for _, m, own in owners)
    return 3 if packed else 1
