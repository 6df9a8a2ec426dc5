"""What is in tiles while a model is offloaded, and how its tiles become one again: after the block,
where one is copied and let go of after the other, and in state dicts, which have the names and
shapes of the whole both ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.parameters.offloaded.placeholders import placeholder, refusal_of_tiled
from infinity.parameters.records import compute_dtype_of
from infinity.tiling.belongings import cut_gradient, watch_arrivals
from infinity.tiling.tile import CHILD, RowRange, Tile, refused_as_whole
from infinity.tiling.weight import TiledWeight
from infinity.tiling.wholes import lie_as_cut

_TABLES = (
    *("_state_dict_hooks", "_load_state_dict_pre_hooks"),
    "_load_state_dict_post_hooks",
)


@dataclass(slots=True, eq=False)
class _Joining:
    """``whole`` has the rows of so many tiles."""

    whole: Any
    num_tiles: int = 0


class Cut(ABC):
    """Parameters that are in tiles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._joined: dict[int, _Joining] = {}
        """By the parameter's ``id``, on the way out."""
        self._gradients: dict[int, torch.Tensor] = {}
        """Those that parameters came with, likewise."""

    @abstractmethod
    def pairs(self) -> Iterator[tuple[Any, list[tuple[Any, RowRange]]]]:
        """Each parameter with its tiles and their rows."""

    @abstractmethod
    def replace(self) -> None:
        """Put the tiles into the model; ``restore`` undoes it, also if this was interrupted."""

    @abstractmethod
    def restore(self) -> None:
        """Put the parameters, which have their values, back. Idempotent."""

    @property
    def is_absent(self) -> bool:
        """Whether tiles have no values that the whole should have."""
        return not self._joined and any(
            tile.is_meta and not parameter.is_meta
            for parameter, tiles in self.pairs()
            for tile, _ in tiles
        )

    def has_any(self, tiles: Set[int]) -> bool:
        """Whether one of these, by their ``id``, is a tile of this cut."""
        return any(id(tile) in tiles for _, own in self.pairs() for tile, _ in own)

    @abstractmethod
    def standing(self) -> Iterator[tuple[Any, str, list[Tile]]]:
        """Each parameter with its name in the model, and its tiles."""

    def hand_over(
        self, dtype: torch.dtype | None, device: torch.device | None, *, is_partitioned: bool
    ) -> None:
        """The tiles have the gradients and the memory of the parameters from now on, and these,
        which programs may have in lists of their own, stand for the tiles.

        ``dtype`` and ``device``: those to compute with; None: as they are.
        """
        for parameter, rows in self.pairs():
            if parameter.grad is not None:
                self._gradients[id(parameter)] = parameter.grad
                cut_gradient(parameter.grad, parameter, rows)
            if not parameter.is_meta:
                parameter.data = placeholder(
                    parameter.shape,
                    compute_dtype_of(parameter.dtype, dtype),
                    device or parameter.device,
                    refusal_of_tiled(self.name),
                )
        for parameter, name, tiles in self.standing():
            _stand_for(parameter, name, tiles, is_partitioned=is_partitioned)

    def give_back(self, strides: Mapping[int, Sequence[int] | None]) -> None:
        """The parameters return with what the tiles hold; those are emptied one by one. Can be
        called again after an interrupt.
        """
        for parameter, tiles in self.pairs():
            _stand_alone(parameter)
            parameter.requires_grad_(any(tile.requires_grad for tile, _ in tiles))
            if parameter.is_meta:
                self._give_gradient_back(parameter, tiles)
                continue
            if id(parameter) not in self._joined:
                self._joined[id(parameter)] = _joining(
                    parameter.shape, strides[id(parameter)], [tile for tile, _ in tiles]
                )
            joining = self._joined[id(parameter)]
            for tile, (start, stop) in tiles[joining.num_tiles :]:
                joining.whole[start:stop].copy_(tile.detach())
                joining.num_tiles += 1
                tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
            parameter.data = joining.whole
            self._give_gradient_back(parameter, tiles)
        self.restore()

    def _give_gradient_back(self, parameter: Any, tiles: list[tuple[Any, RowRange]]) -> None:
        if any(tile.grad is not None for tile, _ in tiles):  # nothing has used it
            parameter.grad = self._gradients.get(id(parameter))


def _stand_for(parameter: Any, name: str, tiles: Sequence[Tile], *, is_partitioned: bool) -> None:
    """Let ``parameter``, which has no values, be what the tiles are the rows of."""
    watch_arrivals(parameter, name, [tile.parameter for tile in tiles])
    parameter._tiles, parameter._name = tiles, name
    parameter._is_partitioned = is_partitioned
    for tile in tiles:
        vars(tile.parameter)["tile_of"] = name  # what is lent is lent as one
    parameter._is_param = True  # what makes it an instance of nn.Parameter
    parameter.__class__ = TiledWeight


def _stand_alone(parameter: Any) -> None:
    """Undo ``_stand_for``. Idempotent."""
    parameter.__class__ = nn.Parameter
    arrivals = vars(parameter).get("_arrivals")
    if arrivals is not None:
        arrivals.remove()
        parameter.grad = None  # of what was frozen inside, and reached no tile
    for name in TiledWeight.OWN:
        vars(parameter).pop(name, None)


def _joining(
    shape: torch.Size, stride: Sequence[int] | None, tiles: Sequence[torch.Tensor]
) -> _Joining:
    """The tiles as one: where they lie if they were never offloaded, or new memory for them of that
    ``stride`` (None: contiguous).
    """
    first = tiles[0].detach()
    if lie_as_cut(tiles):
        whole = first.as_strided(shape, first.stride(), first.storage_offset())
        return _Joining(whole, num_tiles=len(tiles))
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    whole = torch.empty_strided(shape, stride, dtype=first.dtype, device=first.device)
    return _Joining(whole)


class StateDictHooks:
    """On a module in whose place, or as whose child, others have its parameters.

    ``wholes`` gives them by name, as they are when it is called. What is loaded is cut by the
    module itself if it has no ``TileList``. ``tiles``: those of it that are meant; None: all, and
    they have the names of the wholes.
    """

    def __init__(
        self,
        module: nn.Module,
        wholes: Mapping[str, Callable[[], torch.Tensor]],
        tiles: Sequence[Tile] | None = None,
    ) -> None:
        self._module = module
        self._wholes = wholes
        self._tiles = tiles
        self._prefix = ""
        self._absent: set[str] = set()
        """What the module is called, and what of it is not there, in what is loaded."""

    def attach(self) -> None:
        self._module._register_state_dict_hook(self._join)
        handle = nn.Module.register_load_state_dict_pre_hook(self._module, self._split)
        # Before one of the module itself, which takes what it cuts or refuses out of the dict.
        hooks: Any = self._module._load_state_dict_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        self._module.register_load_state_dict_post_hook(self._tell)

    def detach(self) -> None:
        """Idempotent. By what the module has: an interrupt may have kept a handle from us."""
        for table in _TABLES:
            hooks = getattr(self._module, table)
            for number, hook in list(hooks.items()):
                if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                    del hooks[number]

    def _join(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for name, whole in self._wholes.items():
            for key, _ in self._parts(name, prefix):
                state_dict.pop(key, None)
            with torch.no_grad():
                state_dict[f"{prefix}{name}"] = whole()

    def _split(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Before loading."""
        *_, errors = rest
        self._prefix = prefix
        self._absent = {name for name in self._wholes if f"{prefix}{name}" not in state_dict}
        if self._tiles is None:
            return
        for name in self._wholes.keys() - self._absent:
            whole = state_dict.pop(f"{prefix}{name}")
            with torch.no_grad():
                shape = self._wholes[name]().shape
            if refused_as_whole(whole, shape, f"{prefix}{name}", errors):
                continue
            for key, tile in self._parts(name, prefix):
                state_dict[key] = whole[tile.start : tile.stop]

    def _tell(self, module: nn.Module, incompatible: Any) -> None:
        """Behind loading: what was missing is told as the whole."""
        whole_of = {
            key: f"{self._prefix}{name}" if name in self._absent else None
            for name in self._wholes
            for key, _ in self._parts(name, self._prefix)
        }
        missing = incompatible.missing_keys
        told = dict.fromkeys(whole_of.get(key, key) for key in missing)
        missing[:] = [key for key in told if key is not None]

    def _parts(self, name: str, prefix: str) -> Iterator[tuple[str, Any]]:
        """The tiles of ``name`` in the order of rows, by their names in state dicts."""
        tiles: Any = self._module._modules.get(CHILD) or ()
        for index, tile in enumerate(tiles):
            if self._tiles is None:
                yield f"{prefix}{CHILD}.{index}.{name}", tile
            elif any(tile is own for own in self._tiles):
                yield f"{prefix}{CHILD}.{index}.{tile.name}", tile
