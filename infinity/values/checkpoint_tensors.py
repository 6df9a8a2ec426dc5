"""What a checkpoint calls a parameter: its name and shape, of which a tiled one has one for all of
its tiles.

Tiles are whole rows, so the elements of a tiled weight are those of its tiles one after the other.
Checkpoints therefore know nothing of tiles, and load into a model with other tiles or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.parameters.records import Record
from infinity.tiling.tile import CHILD, TileList
from infinity.tiling.tiled_linear import TiledLinear
from swap.plan.layout import Component


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, whose elements are those of ``parts``, one after the other."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """Stands for all of them in what tiles have in common."""
        return self.parts[0]

    def count(self, component: Component) -> int:
        """Values of a component: blocks do not reach from one part into the next."""
        return sum(component.count(part.numel) for part in self.parts)

    def split(
        self, start: int, length: int, component: Component
    ) -> Iterator[tuple[Record, int, int, int]]:
        """(part, first value in the part, first value in the range, values) for all that values
        ``[start, start + length)`` of a component touch.
        """
        at = 0
        for part in self.parts:
            count = component.count(part.numel)
            low = max(start, at)
            high = min(start + length, at + count)
            if low < high:
                yield part, low - at, low - start, high - low
            at += count


def checkpoint_tensors_of(model: nn.Module, records: Sequence[Record]) -> list[CheckpointTensor]:
    """One for every parameter, tiles together, in the order that the model has without tiles."""
    by_id = {id(record.parameter): record for record in records}
    leaves = {}
    for record in records:
        leaves[record.index] = CheckpointTensor(record.name, tuple(record.shape), (record,))
    named: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tiles in _tensors_of(module):
            if id(tiles[0]) in named:
                continue  # a module before has them as well, and their name
            named.add(id(tiles[0]))
            parts = tuple(by_id[id(tile)] for tile in tiles)
            if len({(part.spec.trainable, part.spec.dtype) for part in parts}) > 1:
                continue  # a program froze some of the tiles only: there is no whole to speak of
            for part in parts[1:]:
                leaves.pop(part.index, None)
            rows = sum(part.shape[0] for part in parts)
            shape = (rows, *parts[0].shape[1:])
            leaves[parts[0].index] = CheckpointTensor(
                f"{prefix}.{name}" if prefix else name, shape, parts
            )
    found = (parameter for module in model.modules() for parameter in _in_order(module))
    indices = [by_id[id(parameter)].index for parameter in found if id(parameter) in by_id]
    order = dict.fromkeys([*indices, *leaves])
    return [leaves[index] for index in order if index in leaves]


def _in_order(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of ``module`` itself, with tiles where it had what they are of."""
    tiles = module._modules.get(CHILD)
    own = dict.items(module._parameters)  # past ``WatchedParameters``, which would fetch weights
    if not isinstance(tiles, TileList):
        yield from (parameter for _, parameter in own if parameter is not None)
        return
    parameters = {name: parameter for name, parameter in own if parameter is not None}
    for name in dict.fromkeys([*tiles.order, *parameters]):
        yield from [tile.parameter for tile in tiles.of(name)]
        if name in parameters:
            yield parameters[name]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """What ``module`` would have itself, but for its tiles, and the parameters of those."""
    if isinstance(module, TiledLinear):
        # Past ``WatchedParameters``, which would fetch what is looked up in it.
        for name in ("weight", "bias") if module.has_bias else ("weight",):
            yield name, [dict.get(tile._parameters, name) for tile, _ in module.rows()]
    tiles = module._modules.get(CHILD)
    if isinstance(tiles, TileList):
        for name in tiles.names:
            yield name, [tile.parameter for tile in tiles.of(name)]
