"""``TiledLinear``: a linear layer whose weight is several parameters, so that none is large.

The weight is cut between output features: a tile is an ordinary ``nn.Linear`` that computes some of
the outputs, and every output element is the same dot product as in the whole layer. Offloaded, one
tile is in memory at a time instead of the whole layer. Follows ZeRO-Infinity (arXiv 2104.07857,
section 5.1.3), memory-centric tiling.

What is bit-identical: a tiled model under any budget to the same tiled model in memory. To the
layer that is not tiled, results are the same sums in another order. An output element, and an
element of the gradient of the weight, is one dot product in both, but a BLAS may choose another
kernel for another shape (mostly it does not, and the bits agree). The gradient of the input is a
sum over the tiles, each rounded to its dtype, where the whole layer rounds once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from infinity.tiling.tile import RowRange, refused_as_whole, rows_of_parameter
from swap.tiers import check_count, parse_bytes


def rows_of(out_features: int, tiles: int) -> list[RowRange]:
    """Near-equal row ranges of ``tiles`` tiles."""
    cuts = [out_features * tile // tiles for tile in range(tiles + 1)]
    return list(itertools.pairwise(cuts))


def tiles_within(out_features: int, row_bytes: int, max_parameter_bytes: int) -> int:
    """The fewest tiles of at most ``max_parameter_bytes`` each.

    Raises ``ValueError`` when one row is larger than that.
    """
    rows = max_parameter_bytes // row_bytes if row_bytes else out_features
    if rows < 1:
        raise ValueError(
            f"max_parameter_bytes={max_parameter_bytes} is less than one row of the weight, "
            f"{row_bytes} bytes, and tiles are whole rows"
        )
    return max(1, -(-out_features // rows))


class TiledLinear(nn.Module):
    """``nn.Linear`` in ``tiles`` pieces of near-equal numbers of output features.

    Takes and gives what ``nn.Linear`` does; its parameters are ``tiles.<i>.weight`` of shape
    (rows, in_features) and ``tiles.<i>.bias``. ``load_state_dict`` takes those of the whole layer,
    ``weight`` and ``bias``, as well. Raises ``ValueError`` for a number of tiles that cannot be.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tiles: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count(in_features, name="in_features", least=0)
        check_count(out_features, name="out_features", least=0)
        check_count(tiles, name="tiles", least=0)
        if not 1 <= tiles <= max(1, out_features):
            raise ValueError(f"tiles={tiles} is not between 1 and out_features={out_features}")
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.tiles = nn.ModuleList(
            nn.Linear(in_features, stop - start, bias, device=device, dtype=dtype)
            for start, stop in rows_of(out_features, tiles)
        )
        nn.Module.register_load_state_dict_pre_hook(self, _split_whole)

    @classmethod
    def from_linear(cls, linear: nn.Linear, max_parameter_bytes: int | str) -> TiledLinear:
        """``linear`` in the fewest tiles of at most ``max_parameter_bytes``.

        The tiles lie in the memory of ``linear`` where that is contiguous: nothing is copied, and
        only one of the two should be trained. Raises ``TypeError`` for a subclass of ``nn.Linear``,
        which may compute something else, and ``ValueError`` when a row is larger than the bound.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(f"{type(linear).__name__} is not nn.Linear itself and is not tiled")
        row_bytes = linear.in_features * linear.weight.element_size()
        bound = parse_bytes(max_parameter_bytes, name="max_parameter_bytes")
        tiles = tiles_within(linear.out_features, row_bytes, bound)
        return cls.cut(linear, tiles)

    @classmethod
    def cut(cls, linear: nn.Linear, tiles: int) -> TiledLinear:
        """``linear`` in that many tiles; see ``from_linear``."""
        has_bias = linear.bias is not None
        tiled = cls(linear.in_features, linear.out_features, has_bias, tiles=tiles, device="meta")
        for tile, rows in tiled.rows():
            tile.weight = rows_of_parameter(linear.weight, rows)
            if has_bias:
                tile.bias = rows_of_parameter(linear.bias, rows)
        return tiled.train(linear.training)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` with the values of now, in new memory: its state dict is that of a layer
        that was never tiled.
        """
        linear = nn.Linear(self.in_features, self.out_features, self.has_bias, device="meta")
        first, _ = self.rows()[0]
        linear.weight = nn.Parameter(self._joined("weight"), first.weight.requires_grad)
        if self.has_bias:
            linear.bias = nn.Parameter(self._joined("bias"), first.bias.requires_grad)
        return linear.train(self.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as nn.Linear has it
        return torch.cat([tile(input) for tile in self.tiles], dim=-1)

    @property
    def weight(self) -> torch.Tensor:
        """All rows, put together anew at every access; gradients flow to the tiles."""
        return self._joined("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """As ``weight``; None without a bias."""
        return self._joined("bias") if self.has_bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise RuntimeError(
                f"the {name} of a TiledLinear is put together of its tiles and cannot be replaced; "
                "change the values of these in place"
            )
        super().__setattr__(name, value)

    def _joined(self, name: str) -> torch.Tensor:
        return torch.cat([getattr(tile, name) for tile, _ in self.rows()])

    def rows(self) -> list[tuple[nn.Linear, RowRange]]:
        """The tiles, and the rows that each has."""
        ranges = rows_of(self.out_features, len(self.tiles))
        return [(_linear(tile), range_) for tile, range_ in zip(self.tiles, ranges, strict=True)]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
        )


def _linear(tile: nn.Module) -> nn.Linear:
    assert isinstance(tile, nn.Linear)
    return tile


def _split_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: give each tile its rows of a whole ``weight`` and ``bias``."""
    assert isinstance(module, TiledLinear)
    *_, errors = rest
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    for name, shape in shapes.items():
        key = f"{prefix}{name}"
        if key not in state_dict or (name == "bias" and not module.has_bias):
            continue
        whole = state_dict.pop(key)
        if refused_as_whole(whole, torch.Size(shape), key, errors):
            continue
        for index, (_, (start, stop)) in enumerate(module.rows()):
            state_dict[f"{prefix}tiles.{index}.{name}"] = whole[start:stop]
