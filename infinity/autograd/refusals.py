"""Wrappers, hooks and parameters of others that an offloaded model cannot have, refused by name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from infinity.parameters.compiled import is_compiled, is_wrapper
from infinity.parameters.offloaded.handlers import check_not_moving
from infinity.parameters.offloaded.parameter import OffloadedParameter, cannot_be_copied
from infinity.parameters.offloaded.placeholders import check_not_transformed
from infinity.tiling.tile import CHILD, Tile, TileList, sees_wholes
from infinity.tiling.weight import TiledWeight
from swap.interruptions.undo import Undo

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

_AVERAGING = "offload the plain model and pass process_group=torch.distributed.group.WORLD"
_WRAPPERS = {
    "DistributedDataParallel": _AVERAGING,
    "DataParallel": _AVERAGING,
    "FullyShardedDataParallel": f"{_AVERAGING}, or keep it and use infinity.OffloadedAdamW",
    "FSDPModule": f"{_AVERAGING}, or keep it and use infinity.OffloadedAdamW",
    "ScriptModule": "offload the model that was traced or scripted, as it was before",
}
_COMPILED = (
    "a graph needs all of its weights at once; compile the modules that the model consists of, "
    "each by itself, before it is offloaded: `for layer in model.layers: layer.compile()`"
)
_SCRIPTED = (
    "weights come and go while the model computes, which a traced or scripted one cannot know; "
    "trace or script the model outside of the block, and call that outside, too"
)


def check_model(model: nn.Module) -> None:
    """Raises ``ValueError`` naming a module that has no place inside the block."""
    if is_compiled(model):
        whole = type(model._modules["_orig_mod"] if is_wrapper(model) else model).__name__
        raise ValueError(
            f"a {whole} that is compiled as a whole cannot be offloaded, since {_COMPILED}"
        )
    for name, module in model.named_modules():
        what = f"{name} ({type(module).__name__})" if name else f"a {type(module).__name__}"
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS:
                raise ValueError(f"{what} cannot be offloaded: {_WRAPPERS[kind.__name__]}")
        if "_hf_hook" in vars(module):  # what else modules have is whatever ``__getattr__`` gives
            raise ValueError(
                f"{what} has a hook of accelerate that moves its weights (from device_map= or "
                "cpu_offload); load the model without device_map, or call "
                "accelerate.hooks.remove_hook_from_submodules(model): offload does the placing"
            )


def check_call(kind: str) -> None:
    """Raises ``RuntimeError`` when a module, a ``kind``, is called in what it cannot work in."""
    check_not_traced()
    # Frames that are compiled now, or run between two that are, have a callback.
    if "torch._dynamo" in sys.modules and _get_eval_frame_callback() is not None:
        raise RuntimeError(
            f"an offloaded {kind} was called under torch.compile, by something that is no compiled "
            f"block of the model: {_COMPILED}"
        )
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError(
            "an offloaded model was called by DistributedDataParallel, which would average "
            f"nothing: {_AVERAGING}"
        )


def check_use(what: str) -> None:
    """Raises ``RuntimeError`` naming ``what``, a parameter or a gradient, where it cannot be used:
    in a graph, a transform, or a handler that broke into the library.
    """
    check_not_traced(f"{what}, which is offloaded,")
    check_not_compiled(what)
    check_not_transformed(what)
    check_not_moving(what)


def check_not_traced(what: str = "an offloaded model") -> None:
    """Raises ``RuntimeError`` naming ``what`` while what is computed on this thread becomes a graph
    (of TorchScript, of make_fx): it would read weights later that it knows by their memory alone.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(f"{what} was used in torch.jit.trace: {_SCRIPTED}")
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracing is not None and tracing.get_proxy_mode() is not None:
        raise RuntimeError(f"{what} was used in make_fx: {_SCRIPTED}")
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise RuntimeError(
            f"{what} was used under FakeTensorMode, which computes without values, while weights "
            "are fetched with theirs; do that with the model outside of the block"
        )


def check_not_compiled(name: str) -> None:
    """Raises ``RuntimeError`` while torch.compile makes a graph of what takes ``name``."""
    if "torch._dynamo" in sys.modules and torch._guards.TracingContext.try_get() is not None:
        raise RuntimeError(
            f"{name}, which is offloaded, was used under torch.compile, by something that is no "
            f"compiled block of the model: {_COMPILED}"
        )


def refuse_script(module: nn.Module, undo: Undo) -> None:
    """Let ``torch.jit.script`` of ``module`` raise ``RuntimeError``, until ``undo`` is closed."""

    def prepare() -> NoReturn:
        raise RuntimeError(
            f"an offloaded {type(module).__name__} was given to torch.jit.script: {_SCRIPTED}"
        )

    undo.callback(module.__dict__.pop, "__prepare_scriptable__", None)  # first: an interrupt
    module.__dict__["__prepare_scriptable__"] = prepare


def _get_eval_frame_callback() -> Any:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback()


class _Host(Protocol):
    def visit(self, index: int) -> None:
        """A parameter is looked up."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward runs on this thread."""


_OTHER_WEIGHTS = (
    "; to compute with other weights, as torch.func.functional_call does, take a copy of the "
    "module from before the block, or functions (F.linear)"
)


class WatchedParameters(dict[str, Any]):
    """A module's parameters; looking one up by name makes its weights resident. They can be neither
    replaced nor removed, but inside forward, for as long as they have a parametrization (PEFT gives
    experts one there): it has them then.

    Of what is in tiles it knows the names alone: what stands for it is among the ``attributes`` of
    the module. A thread that sees wholes walks over these, and over none of the tiles.
    """

    def __init__(self, module: nn.Module, host: _Host) -> None:
        super().__init__(module._parameters)
        self._host = host
        self._attributes = vars(module)
        self._is_of_tile = isinstance(module, Tile)
        self._tiled = _in_tiles(self._attributes)
        self._parametrized: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._tiled:
            return self._tiled[name]
        parameter = super().__getitem__(name)
        if isinstance(parameter, OffloadedParameter):
            self._host.visit(parameter.offload_index)
        return parameter

    def keys(self) -> dict_keys[str, Any]:
        return self._wholes().keys() if sees_wholes() else super().keys()

    def values(self) -> dict_values[str, Any]:
        return self._wholes().values() if sees_wholes() else super().values()

    def items(self) -> dict_items[str, Any]:
        return self._wholes().items() if sees_wholes() else super().items()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._tiled

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._tiled:  # torch has taken it out of the attributes
            self._attributes[name] = self._tiled[name]
        if value is self._parametrized.get(name, self):
            super().__setitem__(name, value)
            del self._parametrized[name]
        elif value is not self._tiled.get(name, dict.get(self, name)):
            raise RuntimeError(
                f"{self._full_name(name)} cannot be replaced while the model is offloaded; change "
                "its values inside `with offloaded.gathered([parameter], modify=True)`, or replace "
                "it (resize_token_embeddings does) before the block, or after it (a trainer ends "
                f"it by close()){_OTHER_WEIGHTS}"
            )

    def __delitem__(self, name: str) -> None:
        if self._host.is_computing and super().__contains__(name):
            self._parametrized[name] = dict.get(self, name)
            super().__delitem__(name)
            return
        raise RuntimeError(
            f"{self._full_name(name)} cannot be removed while the model is offloaded; change the "
            "model before the block, or after it (a trainer ends it by close())"
        )

    def _wholes(self) -> dict[str, Any]:
        """What a module has without tiles, in that order; a tile has nothing."""
        if self._is_of_tile:
            return {}
        found = dict(dict.items(self)) | self._tiled
        tiles = self._attributes["_modules"].get(CHILD) if self._tiled else None
        order = tiles.order if isinstance(tiles, TileList) else ()
        return {name: found[name] for name in dict.fromkeys([*order, *found]) if name in found}

    def _full_name(self, name: str) -> str:
        """Of a parameter that is here now; a new one has no other than its own."""
        if name in self._tiled:
            return self._tiled[name]._cut_name
        parameter = dict.get(self, name)
        if isinstance(parameter, OffloadedParameter):
            return parameter.offload_owner.name_of(parameter.offload_index)
        return f"parameter {name!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._tiled or self._parametrized or any(p is not None for p in dict.values(self)):
            raise cannot_be_copied()
        return dict, (dict(dict.items(self)),)  # a norm without weights, which has names for them


class Watched:
    """The modules that have ``WatchedParameters`` in the place of their own dictionary."""

    def __init__(self) -> None:
        self._modules: list[tuple[nn.Module, dict[str, Any]]] = []

    def begin(self, model: nn.Module, host: _Host) -> None:
        """Every module of ``model`` that has parameters. One that the model of another block has,
        too, has places for them alone, which that block watches.
        """
        for module in model.modules():
            if type(module._parameters) is WatchedParameters:
                continue
            if module._parameters or _in_tiles(vars(module)):
                self._modules.append((module, module._parameters))
                module._parameters = WatchedParameters(module, host)

    def end_of(self, modules: Collection[nn.Module]) -> None:
        """These are not watched any more. Idempotent."""
        for module, parameters in self._modules:
            if module in modules:
                _give_back(module, parameters)

    def end(self) -> None:
        """None is. Can be called again after an interrupt."""
        while self._modules:
            _give_back(*self._modules[-1])
            self._modules.pop()


def _in_tiles(attributes: dict[str, Any]) -> dict[str, TiledWeight]:
    """Of a module with these ``attributes``, without what it refers to of another beside torch."""
    tiles = attributes["_modules"].get(CHILD)
    names = tiles.names if isinstance(tiles, TileList) else ()
    own = {name: attributes.get(name) for name in names}
    return {name: value for name, value in own.items() if isinstance(value, TiledWeight)}


def _give_back(module: nn.Module, parameters: dict[str, Any]) -> None:
    """``module`` has ``parameters`` again, with what it has in the dictionary that it has now."""
    if module._parameters is not parameters:
        parameters.update(dict.items(module._parameters))
        for name in parameters.keys() - dict.keys(module._parameters):
            del parameters[name]
        module._parameters = parameters


def refuse_compiled(model: nn.Module) -> NoReturn:
    """Raise ``RuntimeError`` for a model that was compiled as a whole inside the block."""
    raise RuntimeError(
        f"an offloaded {type(model).__name__} was compiled as a whole, and called: {_COMPILED}"
    )


def check_late(what: str, needed_bytes: int, room_bytes: int) -> None:
    """Raises ``RuntimeError`` for a module that was compiled too late for the budget to count it,
    and needs more weights at once than there is room for.
    """
    if needed_bytes > room_bytes:
        raise RuntimeError(
            f"{what} was compiled inside the offload block and computes from {needed_bytes} bytes "
            f"of weights at once, where this budget has room for {room_bytes}; compile it before "
            "the block, whose least budget counts that then, or give more host_memory"
        )


class AfterBlock:
    """In the place of what a block was made of, once that has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise refusal_after_block()


def refusal_after_block() -> RuntimeError:
    return RuntimeError("the model is not offloaded any more: use it inside the `with` block")
