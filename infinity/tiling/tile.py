"""A tile: some rows of a parameter, as a parameter of a module of its own, so that hooks on modules
have one tile at a time in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.parameters.gradient import GradientOwner, OffloadedGradient

RowRange = tuple[int, int]
"""First row, and the row after the last."""

CHILD = "tiles"
"""What a module calls the ``TileList`` of its parameters."""


class Tile(nn.Module):
    """Rows [``start``, ``stop``) of the parameter ``name`` of the module that it belongs to."""

    def __init__(self, name: str, parameter: nn.Parameter, rows: RowRange) -> None:
        super().__init__()
        self.name = name
        self.start, self.stop = rows
        self.register_parameter(name, parameter)

    def forward(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """``function`` of the weights, which are in memory for as long as it runs, and ``args``."""
        return function(getattr(self, self.name), *args)

    @property
    def parameter(self) -> nn.Parameter:
        """Itself; its weights need not be in memory."""
        found = dict.get(self._parameters, self.name)
        assert found is not None
        return found

    def extra_repr(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


class GradientOfTiles:
    """Keeps the gradient of a parameter whose tiles have the rows of it: the owner of an
    ``OffloadedGradient``, of which there is one, 0.
    """

    def __init__(self, tiles: Sequence[Tile], name: str) -> None:
        self._tiles = tiles
        self._name = name

    def is_there(self) -> bool:
        """Whether all tiles have gradients, and these are offloaded."""
        parts = [tile.parameter.grad for tile in self._tiles]
        return all(isinstance(part, OffloadedGradient) for part in parts)

    def gradient_age(self, _: int) -> int:
        return sum(owner.gradient_age(index) for owner, index in self._owners())

    def gradient_values(self, _: int, age: int) -> torch.Tensor:
        self._check(age)
        return torch.cat(
            [
                owner.gradient_values(index, owner.gradient_age(index))
                for owner, index in self._owners()
            ]
        )

    def keep_gradient(self, _: int, values: torch.Tensor) -> None:
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.keep_gradient(index, rows)

    def overwrite_gradient(self, _: int, age: int, values: torch.Tensor) -> None:
        self._check(age)
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.overwrite_gradient(index, owner.gradient_age(index), rows)

    def name_of(self, _: int) -> str:
        return self._name

    def _check(self, age: int) -> None:
        if age != self.gradient_age(0):
            raise RuntimeError(
                f"the gradient of {self._name} has been cleared or replaced since it was taken; "
                "read the parameter's grad again"
            )

    def _owners(self) -> list[tuple[GradientOwner, int]]:
        offloaded: list[Any] = [tile.parameter for tile in self._tiles]
        return [(part.offload_owner, part.offload_index) for part in offloaded]

    def _rows_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Copies: a store that keeps rows must not keep the whole."""
        first = self._tiles[0].start
        return [values[tile.start - first : tile.stop - first].clone() for tile in self._tiles]


class TileList(nn.ModuleList):
    """The tiles of one parameter or several, as a child of the module that had them.

    What computes with a tile keeps no weights for the backward pass, so that a block which is
    checkpointed never has all of them in memory.
    """

    has_fleeting_weights = True

    def __init__(self, tiles: Iterable[Tile] = ()) -> None:
        super().__init__(tiles)

    def of(self, name: str) -> list[Tile]:
        """Those of the parameter ``name``, in the order of their rows."""
        return [tile for tile in self if isinstance(tile, Tile) and tile.name == name]

    @property
    def names(self) -> list[str]:
        """The parameters that there are tiles of."""
        return list(dict.fromkeys(tile.name for tile in self if isinstance(tile, Tile)))


def lie_as_cut(tiles: Sequence[torch.Tensor]) -> bool:
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
