"""State dicts of modules with parameters in tiles: these have the names and shapes of wholes, both
ways, and hooks of a program see them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.tiling.tile import CHILD, Tile, refused_as_whole, seeing
from infinity.tiling.wholes import kept_whole_of

_TABLES = (
    *("_state_dict_hooks", "_load_state_dict_pre_hooks"),
    "_load_state_dict_post_hooks",
)
_LOAD = "_load_from_state_dict"


class StateDictHooks:
    """Those of ``module`` for its parameter ``name`` of this ``shape``, which is in ``tiles``, and
    comes behind the parameters ``before`` it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        tiles: Sequence[Tile],
        shape: torch.Size,
        before: Sequence[str],
    ) -> None:
        self._module, self._name = module, name
        self._tiles, self._shape, self._before = tiles, shape, before
        self._prefix, self._is_absent = "", False
        """What the module is called, and whether the parameter is not there, in what is loaded."""

    def attach(self) -> None:
        module: Any = self._module
        module._register_state_dict_hook(self._join)
        module.register_load_state_dict_post_hook(self._tell)
        for table in (module._state_dict_hooks, module._load_state_dict_post_hooks):
            for number in [n for n, hook in table.items() if not _is_ours(hook)]:
                table.move_to_end(number)
        module.register_load_state_dict_pre_hook(self._split)
        vars(module)[_LOAD] = partial(_load_behind_hooks, module)

    def detach(self) -> None:
        """Idempotent. By what the module has: an interrupt may have kept a handle from us."""
        for name in _TABLES:
            table = getattr(self._module, name)
            for number, hook in list(table.items()):
                if _owner_of(hook) is self:
                    del table[number]
        if not _own_hooks(self._module):
            vars(self._module).pop(_LOAD, None)

    def _join(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        parts = [(state_dict.pop(key, None), tile) for key, tile in self._parts(prefix)]
        keeps_parameters = any(value is tile.parameter for value, tile in parts)
        self._forget_tiles(state_dict, prefix)
        before = {f"{prefix}{name}" for name in self._before}
        behind = [key for key in state_dict if key.startswith(prefix) and key not in before]
        with torch.no_grad():
            state_dict[f"{prefix}{self._name}"] = (
                getattr(module, self._name)  # state_dict(keep_vars=True)
                if keeps_parameters
                else kept_whole_of([tile.parameter for tile in self._tiles])
            )
        for key in behind:
            state_dict[key] = state_dict.pop(key)

    def _forget_tiles(self, state_dict: Any, prefix: str) -> None:
        """What torch notes of each module is not noted of tiles."""
        metadata = getattr(state_dict, "_metadata", {})
        own = f"{prefix}{CHILD}"
        for name in [n for n in metadata if n == own or n.startswith(f"{own}.")]:
            del metadata[name]

    def _split(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Before loading."""
        *_, errors = rest
        key = f"{prefix}{self._name}"
        self._prefix, self._is_absent = prefix, key not in state_dict
        if self._is_absent:
            return
        whole = state_dict.pop(key)
        if not refused_as_whole(whole, self._shape, key, errors):
            state_dict.update({k: whole[t.start : t.stop] for k, t in self._parts(prefix)})

    def _tell(self, module: nn.Module, incompatible: Any) -> None:
        """Behind loading: what was missing is told as the whole."""
        whole = f"{self._prefix}{self._name}" if self._is_absent else None
        parts = {key for key, _ in self._parts(self._prefix)}
        missing = incompatible.missing_keys
        told = dict.fromkeys(whole if key in parts else key for key in missing)
        missing[:] = [key for key in told if key is not None]

    def _parts(self, prefix: str) -> Iterator[tuple[str, Tile]]:
        """The tiles in the order of rows, by their names in state dicts."""
        tiles: Any = self._module._modules.get(CHILD) or ()
        for index, tile in enumerate(tiles):
            if any(tile is own for own in self._tiles):
                yield f"{prefix}{CHILD}.{index}.{tile.name}", tile


def _owner_of(hook: Any) -> object:
    return getattr(getattr(hook, "hook", hook), "__self__", None)


def _is_ours(hook: Any) -> bool:
    return isinstance(_owner_of(hook), StateDictHooks)


def _own_hooks(module: nn.Module) -> list[int]:
    """The numbers of hooks that cut what is loaded."""
    hooks = module._load_state_dict_pre_hooks
    return [number for number, hook in hooks.items() if _is_ours(hook)]


def _load_behind_hooks(module: nn.Module, *args: Any) -> None:
    """In the place of the method of ``module``: hooks of the program, whenever they came, have the
    wholes, which are cut behind the last of them.
    """
    hooks: Any = module._load_state_dict_pre_hooks
    for number in _own_hooks(module):
        hooks.move_to_end(number)
    with seeing(wholes=False):
        type(module)._load_from_state_dict(module, *args)
