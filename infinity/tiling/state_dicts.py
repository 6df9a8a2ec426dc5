"""State dicts of modules whose parameters are in tiles: they have the names and shapes of the
whole, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.tiling.tile import CHILD, Tile, TileList

_TABLES = ("_state_dict_hooks", "_load_state_dict_pre_hooks")


class StateDictHooks:
    """On a module in whose place, or as whose child, others have its parameters.

    ``wholes`` gives them by name, as they are when it is called. What is loaded is cut by the
    module itself if it has no ``TileList``; ``set_values`` takes a whole that has its tiles in
    another module.
    """

    def __init__(
        self,
        module: nn.Module,
        wholes: Mapping[str, Callable[[], torch.Tensor]],
        set_values: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._module = module
        self._wholes = wholes
        self._set_values = set_values

    def attach(self) -> None:
        self._module._register_state_dict_hook(self._join)
        nn.Module.register_load_state_dict_pre_hook(self._module, self._split)

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
            if self._set_values is None:
                of_tiles = f"{prefix}{CHILD}."
                for key in [key for key in state_dict if key.startswith(of_tiles)]:
                    if key.rpartition(".")[2] == name:
                        del state_dict[key]
            with torch.no_grad():
                state_dict[f"{prefix}{name}"] = whole()

    def _split(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before loading: a whole of another shape is left, and not found in the module."""
        for name, own in self._wholes.items():
            whole = state_dict.get(f"{prefix}{name}")
            if whole is None:
                continue
            if self._set_values is not None:
                del state_dict[f"{prefix}{name}"]
                self._set_values(whole)
                continue
            tiles = module._modules.get(CHILD)
            if isinstance(tiles, TileList) and whole.shape == own().shape:
                del state_dict[f"{prefix}{name}"]
                for index, tile in enumerate(tiles):
                    if isinstance(tile, Tile) and tile.name == name:
                        key = f"{prefix}{CHILD}.{index}.{name}"
                        state_dict[key] = whole[tile.start : tile.stop]
