"""Parameters that are cut into tiles where they are: the modules that have them stay, with a
``TiledWeight`` in the place of the parameter, and the tiles as a child.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from infinity.parameters.offloaded.placeholders import placeholder, refusal_of_tiled
from infinity.tiling.belongings import reason_against_parameter, watch_arrivals
from infinity.tiling.groups import touch
from infinity.tiling.joining import Cut, StateDictHooks
from infinity.tiling.tile import CHILD, RowRange, Tile, TileList
from infinity.tiling.tiled_linear import rows_of, rows_of_parameter
from infinity.tiling.weight import TiledWeight, begin_computing, end_computing

Owner = tuple[str, nn.Module, str]
"""What the model calls a module, the module, and what that calls a parameter."""
_PACKED = "in_proj_weight"
_PROJECTIONS = (_PACKED, "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Of ``nn.MultiheadAttention``; the first has those of query, key and value."""
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Stacks of matrices, of what transformers calls experts."""


class CutWeight(Cut):
    """One parameter in ``num_tiles`` tiles, for all ``owners`` that have it."""

    def __init__(
        self,
        owners: Sequence[Owner],
        num_tiles: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_partitioned: bool,
    ) -> None:
        (prefix, self._first, self._own_name), *_ = owners
        super().__init__(f"{prefix}.{self._own_name}" if prefix else self._own_name)
        self._places = [(module, own) for _, module, own in owners]
        self._orders = [list(module._parameters) for module, _ in self._places]
        parameter = self._first._parameters[self._own_name]
        assert parameter is not None
        self._parameter = parameter
        self._tiles = [
            Tile(self._own_name, rows_of_parameter(parameter, rows), rows)
            for rows in rows_of(parameter.shape[0], num_tiles)
        ]
        self._face: Any = weight_of(
            self._tiles, self.name, parameter, dtype, device, is_partitioned=is_partitioned
        )

        self._hooks = [
            StateDictHooks(module, {name: self._face.whole}, self._tiles)
            for module, name in self._places
        ]

    def pairs(self) -> Iterator[tuple[Any, list[tuple[Any, RowRange]]]]:
        yield (
            self._parameter,
            [(tile.parameter, (tile.start, tile.stop)) for tile in self._tiles],
        )

    def standing(self) -> Iterator[tuple[Any, str, list[Tile]]]:
        yield self._parameter, self.name, self._tiles

    def replace(self) -> None:
        for module, own in self._places:  # each has the tiles: ``parameters()`` of any gives them
            tiles = TileList([*self._others(module), *self._tiles])
            module._modules[CHILD] = tiles.train(module.training)
            del module._parameters[own]
            vars(module)[own] = self._face
        for hooks in self._hooks:
            hooks.attach()
        if self._parameter.dim() == 3:
            self._first.register_forward_pre_hook(self._begin)
            self._first.register_forward_hook(self._touch, always_call=True)

    def restore(self) -> None:
        for hooks in self._hooks:
            hooks.detach()
        for table in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(self._first, table)
            for number, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del hooks[number]
                    self._first._forward_hooks_always_called.pop(number, None)
        for (module, own), order in zip(self._places, self._orders, strict=True):
            vars(module).pop(own, None)
            now = {**module._parameters, own: self._parameter}
            module._parameters = {
                **{name: now[name] for name in order if name in now},
                **{name: value for name, value in now.items() if name not in order},
            }
            others = self._others(module)
            if others:
                module._modules[CHILD] = TileList(others)
            else:
                module._modules.pop(CHILD, None)

    def _begin(self, module: nn.Module, args: Any) -> None:
        begin_computing(self._face)

    def _touch(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Experts that were not chosen have gradients of zeros where others have some."""
        if not end_computing(self._face):
            return output
        is_trained = isinstance(output, torch.Tensor) and output.requires_grad
        return touch(output, self._tiles) if is_trained else output

    def _others(self, module: nn.Module) -> list[Tile]:
        """Tiles of other parameters of the same ``module``."""
        tiles = module._modules.get(CHILD)
        found = [*tiles] if isinstance(tiles, TileList) else []
        return [tile for tile in found if isinstance(tile, Tile) and tile not in self._tiles]


def weight_of(
    tiles: Sequence[Tile],
    name: str,
    whole: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_partitioned: bool,
) -> TiledWeight:
    """What stands for ``whole``, the parameter ``name``, while the tiles have its rows."""
    face = placeholder(whole.shape, dtype, device, refusal_of_tiled(name))
    weight = TiledWeight.of(tiles, name, face, is_partitioned=is_partitioned)
    watch_arrivals(weight, name, weight.tiles)
    return weight


def reason_against(
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
    reason = reason_against_parameter(parameter)
    return reason and f"of a layer {reason}"


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
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear) and own == "weight":
        return None
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


def whole_parts_of(owners: Sequence[Owner]) -> int:
    """The number of tiles is a multiple of this, so that what a module takes apart are tiles."""
    packed = any(type(m) is nn.MultiheadAttention and own == _PACKED for _, m, own in owners)
    return 3 if packed else 1
