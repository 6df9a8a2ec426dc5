"""The gradient of a parameter that is in tiles: those of the tiles, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.parameters.offloaded.assigned import assigned
from infinity.parameters.offloaded.gradient import GradientOwner, OffloadedGradient
from infinity.parameters.offloaded.histories import ChangeCount
from infinity.parameters.offloaded.modes import own_modes
from infinity.tiling.tile import Tile


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

    def gradient_counts(self, _: int) -> list[ChangeCount]:
        return [count for owner, index in self._owners() for count in owner.gradient_counts(index)]

    @own_modes
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

    def assign(self, whole: torch.Tensor, gradient: Any) -> None:
        """Replace it by what a program assigns to ``whole``, which stands for the parameter; or,
        with None, clear it.
        """
        if gradient is not None:
            gradient = assigned(self._name, whole, gradient)
            is_dense = gradient.layout == torch.strided  # others cannot be cut
            gradient = gradient if is_dense else gradient.to_dense()
        for tile, rows in zip(self._tiles, self._rows(), strict=True):
            tile.parameter.grad = None if gradient is None else gradient[rows]

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
        return [values[rows].clone() for rows in self._rows()]

    def _rows(self) -> list[slice]:
        first = self._tiles[0].start
        return [slice(tile.start - first, tile.stop - first) for tile in self._tiles]
