"""A parameter that is cut into tiles where it is: the modules that have it stay, with a
``TiledWeight`` in its place, and the tiles as a child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.parameters.offloaded.becoming import forget_hooks
from infinity.parameters.offloaded.placeholders import placeholder, refusal_of_tiled
from infinity.tiling.gradients import take_as_they_arrive, watch_arrivals
from infinity.tiling.groups import begin_computing, end_computing, touch
from infinity.tiling.state_dicts import StateDictHooks
from infinity.tiling.tile import (
    CHILD,
    Owner,
    RowRange,
    Tile,
    TileList,
    cut_gradient,
    rows_of_parameter,
)
from infinity.tiling.weight import TiledWeight
from infinity.tiling.wholes import lie_as_cut


@dataclass(slots=True, eq=False)
class _Joining:
    """``whole`` has the rows of so many tiles, on the way out."""

    whole: torch.Tensor
    num_tiles: int = 0


class CutWeight:
    """One parameter in tiles of these ``rows``, for all ``owners`` that have it, with the names of
    all parameters of each, in their order.

    ``dtype`` and ``device``: those to compute with. ``stride``: of the parameter as it was, with
    which it returns; None: contiguous.
    """

    def __init__(
        self,
        owners: Sequence[tuple[Owner, Sequence[str]]],
        rows: Sequence[RowRange],
        dtype: torch.dtype,
        device: torch.device,
        *,
        stride: Sequence[int] | None,
        is_partitioned: bool,
    ) -> None:
        ((prefix, self._first, own_name), _), *_ = owners
        self.name = f"{prefix}.{own_name}" if prefix else own_name
        self._places = [(module, own) for (_, module, own), _ in owners]
        self._orders = [order for _, order in owners]
        parameter: Any = self._first._parameters[own_name]
        self._parameter = parameter
        self._tiles = [Tile(own_name, rows_of_parameter(parameter, part), part) for part in rows]
        self._dtype, self._device, self._stride = dtype, device, stride
        self._is_partitioned = is_partitioned
        self._face = TiledWeight.of(
            self._tiles, self.name, self._placeholder(), is_partitioned=is_partitioned
        )
        take_as_they_arrive(self._face.tiles)
        watch_arrivals(self._face, self.name, self._face.tiles)
        self._hooks = [
            StateDictHooks(module, own, self._tiles, parameter.shape, order[: order.index(own)])
            for (module, own), order in zip(self._places, self._orders, strict=True)
        ]
        self._joining: _Joining | None = None
        self._gradient: torch.Tensor | None = None
        """That which the parameter came with."""

    @property
    def parameter(self) -> nn.Parameter:
        """What is cut."""
        found: nn.Parameter = self._parameter
        return found

    @property
    def tiles(self) -> Sequence[Tile]:
        """In the order of their rows."""
        return self._tiles

    @property
    def is_absent(self) -> bool:
        """Whether tiles have no values that the whole should have."""
        if self._joining is not None or self._parameter.is_meta:
            return False
        return any(tile.parameter.is_meta for tile in self._tiles)

    def replace(self) -> None:
        """Put the tiles into the model; ``restore`` undoes it, also if this was interrupted."""
        for (module, own), order in zip(self._places, self._orders, strict=True):
            # Each has the tiles: ``parameters()`` of any gives them.
            tiles = TileList([*self._others(module), *self._tiles], order)
            module._modules[CHILD] = tiles.train(module.training)
            del module._parameters[own]
            vars(module)[own] = self._face
        for hooks in self._hooks:
            hooks.attach()
        if self._parameter.dim() == 3:
            self._first.register_forward_pre_hook(self._begin)
            self._first.register_forward_hook(self._touch, always_call=True)

    def hand_over(self) -> None:
        """The tiles have the gradient and the memory of the parameter from now on, and this, which
        programs may have in lists of their own, stands for the tiles.
        """
        parameter, tiles = self._parameter, [tile.parameter for tile in self._tiles]
        if parameter.grad is not None:
            self._gradient = parameter.grad
            cut_gradient(parameter, [(tile.parameter, tile.rows) for tile in self._tiles])
        if not parameter.is_meta:
            parameter.data = self._placeholder()
        watch_arrivals(parameter, self.name, tiles)
        parameter._cut_tiles, parameter._cut_name = self._tiles, self.name
        parameter._cut_by_ranks = self._is_partitioned
        for tile in tiles:
            vars(tile)["tile_of"] = self.name  # what is lent is lent as one
        parameter._is_param = True  # what makes it an instance of nn.Parameter
        is_absent, parameter.__class__ = parameter.is_meta, TiledWeight
        if not is_absent:
            self._face = parameter
            for module, own in self._places:
                vars(module)[own] = parameter

    def give_back(self) -> None:
        """The parameter returns with what the tiles hold; those are emptied one by one. Can be
        called again after an interrupt.
        """
        parameter = self._parameter
        self._stand_alone()
        parameter.requires_grad_(any(tile.parameter.requires_grad for tile in self._tiles))
        if not parameter.is_meta:
            if self._joining is None:
                self._joining = self._begin_joining()
            self._join(self._joining)
            parameter.data = self._joining.whole
        if any(tile.parameter.grad is not None for tile in self._tiles):  # nothing has used it
            parameter.grad = self._gradient
        self.restore()

    def restore(self) -> None:
        """Put the parameter, which has its values, back. Idempotent."""
        for hooks in self._hooks:
            hooks.detach()
        self._remove_forward_hooks()
        for (module, own), order in zip(self._places, self._orders, strict=True):
            vars(module).pop(own, None)
            now = {**module._parameters, own: self._parameter}
            module._parameters = {
                **{name: now[name] for name in order if name in now},
                **{name: value for name, value in now.items() if name not in order},
            }
            others = self._others(module)
            if others:
                module._modules[CHILD] = TileList(others, order)
            else:
                module._modules.pop(CHILD, None)

    def _placeholder(self) -> torch.Tensor:
        refusal = refusal_of_tiled(self.name)
        return placeholder(self._parameter.shape, self._dtype, self._device, refusal)

    def _stand_alone(self) -> None:
        """Undo what ``hand_over`` made of the parameter. Idempotent."""
        parameter = self._parameter
        parameter.__class__ = nn.Parameter
        arrivals = vars(parameter).get("_cut_arrivals")
        if arrivals is not None:
            arrivals.remove()
            forget_hooks(parameter)
            parameter.grad = None  # of what was frozen inside, and reached no tile
        for name in TiledWeight.OWN:
            vars(parameter).pop(name, None)

    def _begin_joining(self) -> _Joining:
        """Where the tiles lie if they were never offloaded, or new memory for them."""
        shape, tiles = self._parameter.shape, [tile.parameter for tile in self._tiles]
        first = tiles[0].detach()
        if lie_as_cut(tiles):
            whole = first.as_strided(shape, first.stride(), first.storage_offset())
            return _Joining(whole, num_tiles=len(tiles))
        stride = self._stride or torch.empty(shape, device="meta").stride()
        whole = torch.empty_strided(shape, stride, dtype=first.dtype, device=first.device)
        return _Joining(whole)

    def _join(self, joining: _Joining) -> None:
        for tile in self._tiles[joining.num_tiles :]:
            joining.whole[tile.start : tile.stop].copy_(tile.parameter.detach())
            joining.num_tiles += 1
            tile.parameter.data = tile.parameter.detach().new_empty(0)

    def _begin(self, module: nn.Module, args: Any) -> None:
        begin_computing(self._face)

    def _touch(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Experts that were not chosen have gradients of zeros where others have some."""
        if not end_computing(self._face):
            return output
        is_trained = isinstance(output, torch.Tensor) and output.requires_grad
        return touch(output, self._tiles) if is_trained else output

    def _remove_forward_hooks(self) -> None:
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            table = getattr(self._first, name)
            for number, hook in list(table.items()):
                if getattr(hook, "__self__", None) is self:
                    del table[number]
                    self._first._forward_hooks_always_called.pop(number, None)

    def _others(self, module: nn.Module) -> list[Tile]:
        """Tiles of other parameters of the same ``module``."""
        tiles = module._modules.get(CHILD)
        found = [*tiles] if isinstance(tiles, TileList) else []
        return [tile for tile in found if isinstance(tile, Tile) and tile not in self._tiles]
