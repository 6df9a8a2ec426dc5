"""What modules hold beside parameters: persistent buffers, and what ``get_extra_state`` gives, by
the names that a state dict has for them; and what else a module without parameters puts into that.

A buffer may be None, and become a tensor in a forward pass; a checkpoint says which are.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_leaves, tree_map_only

import checkpoint

logger = logging.getLogger(__name__)
Buffers = dict[str, torch.Tensor | None]

WRITTEN = "#written"
"""Ends the name of what a module writes by itself, which no model has to have: metrics have it or
not as they are told.
"""


class _StateDict(OrderedDict[str, Any]):
    """As torch makes one, with the versions of modules."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: dict[str, dict[str, Any]] = {}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict would hold."""
    return {name: buffer for name, buffer in buffers_of(model).items() if buffer is not None}


def buffers_of(model: nn.Module) -> Buffers:
    """The same, and those that are None."""
    return {
        name: module._buffers[own]
        for name, (module, own) in _places(model).items()
        if own not in module._non_persistent_buffers_set
    }


def set_buffer(model: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Let a buffer be ``value``: in place where it is a tensor of that shape."""
    module, own = _places(model)[name]
    buffer = module._buffers[own]
    if buffer is None or value is None:
        module._buffers[own] = value
    else:
        # Elsewhere torch refuses those of inference, and those that are given gradients.
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(value)


def module_states(model: nn.Module) -> dict[str, Any]:
    """What every module with a ``get_extra_state`` gives, and what others write by themselves."""
    states = {name: module.get_extra_state() for name, module in _with_state(model)}
    written = {name: _written_by(module) for name, module in _writing(model)}
    return states | {name: told for name, told in written.items() if told["state"]}


def set_module_states(model: nn.Module, states: Mapping[str, Any], device: torch.device) -> None:
    """Undo ``module_states``, on the ``device`` that is computed on."""
    for name, module in _with_state(model):
        if name in states:
            module.set_extra_state(states[name])
    for name, module in _writing(model):
        if states.get(name):
            _take(module, name.removesuffix(WRITTEN), states[name], device)


def states_within(model: nn.Module, values: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """What ``set_module_states`` takes of a state dict that torch made; and the names it has there.
    It goes to the device that is computed on, as a module that moves there takes it along.
    """
    states = {name: values[name] for name, _ in _with_state(model) if name in values}
    names = {*states}
    versions: Mapping[str, Any] = getattr(values, "_metadata", {})
    for name, module in _writing(model):
        path = name.removesuffix(WRITTEN)
        prefix = f"{path}." if path else ""
        own = [key for key in values if key.startswith(prefix)]
        found = {key.removeprefix(prefix): key for key in own}
        found = {key: found[key] for key in _apart(module, found)}
        if found:
            state = {key: values[whole] for key, whole in found.items()}
            metadata = dict(versions.get(path, {}))
            states[name] = {"state": state, "metadata": metadata, "on_device": [*state]}
            names.update(found.values())
    return states, names


def saved_buffers(saved: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, bool]:
    """The buffers of a checkpoint, and whether they were tensors. One that does not say has the
    name of every other tensor of the model.
    """
    if "buffers" in saved:
        told: dict[str, bool] = saved["buffers"]
        return told
    names = (name.removeprefix("model.") for name in _names_of_model(path))
    return dict.fromkeys((name for name in names if name not in saved["shapes"]), True)


def tell_buffers(model: nn.Module, saved: dict[str, Any]) -> None:
    """Let ``saved``, which may be of a file that does not say which of its tensors are parameters,
    have those of this model as buffers.
    """
    for name in persistent_buffers(model):
        if saved["shapes"].pop(name, None) is not None:
            saved["buffers"][name] = True
            for of_parameters in ("dtypes", "planes", "steps", "parts"):
                del saved[of_parameters][name]


def check_modules(
    model: nn.Module,
    saved: Mapping[str, Any],
    theirs: Mapping[str, bool],
    path: str | os.PathLike[str],
) -> None:
    """Raises ``ValueError`` naming a buffer, or a module with state of its own, that only one of
    the checkpoint and the model has.
    """
    registered = _places(model)
    for name, is_tensor in theirs.items():
        if is_tensor and name not in registered:
            raise ValueError(f"{path} has a buffer {name}, which the model has not")
    for name in persistent_buffers(model):
        if name not in theirs:
            raise ValueError(f"{path} has no buffer {name}, which the model has")
    ours = [name for name, _ in _with_state(model)]
    states = saved.get("module_states")
    if states is None:
        _warn_of(ours, path)
        return
    for name in {*ours, *(name for name in states if not name.endswith(WRITTEN))}:
        if name not in states or name not in ours:
            one, other = (path, "the model") if name in states else ("the model", path)
            raise ValueError(f"{one} has {name}, what get_extra_state gives, and {other} has not")


def load_buffers(
    model: nn.Module,
    theirs: Mapping[str, bool],
    device: torch.device,
    load: Callable[[str], torch.Tensor],
    *,
    converts: Collection[str],
    keeps: Collection[str],
) -> None:
    """Give values to buffers that are None here and were not, and take them from those that were.
    ``load`` reads a buffer of the checkpoint. ``converts``: to these others, too, in their dtype.
    ``keeps``: not to these.
    """
    for name, buffer in buffers_of(model).items():
        if name in keeps:
            continue
        if (buffer is None or name in converts) and theirs.get(name):
            set_buffer(model, name, load(name).to(device))
        elif buffer is not None and not theirs.get(name, True):
            set_buffer(model, name, None)


def _warn_of(modules: Iterable[str], path: str | os.PathLike[str]) -> None:
    names = ", ".join(modules)
    if names:
        logger.warning(
            "%s was saved by a version that left out what get_extra_state gives; these modules "
            "keep what they have: %s",
            path,
            names,
        )


def _names_of_model(path: str | os.PathLike[str]) -> list[str]:
    return [name for name in checkpoint.list_tensors(path) if name.startswith("model.")]


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each buffer is that is registered, persistent or not."""
    return {
        f"{prefix}.{own}" if prefix else own: (module, own)
        for prefix, module in model.named_modules()
        for own in module._buffers
    }


def _with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def _writing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without parameters that write a state dict in a way of their own, as metrics of
    torchmetrics that are persistent do, or have hooks that do.
    """
    for prefix, module in model.named_modules():
        kind = type(module)
        is_own = kind.state_dict is not nn.Module.state_dict or (
            kind._save_to_state_dict is not nn.Module._save_to_state_dict
        )
        if (is_own or module._state_dict_hooks) and next(module.parameters(), None) is None:
            yield prefix + WRITTEN, module


def _written_by(module: nn.Module) -> dict[str, Any]:
    """What is in no other place, the version of the module that wrote it, and what of it was not on
    the CPU.
    """
    state = _StateDict()
    module.state_dict(destination=state, prefix="", keep_vars=False)
    own = {name: state[name] for name in _apart(module, state)}
    devices = {k: {x.device.type for x in _tensors(v)} for k, v in own.items()}
    return {
        "state": own,
        "metadata": dict(state._metadata.get("", {})),
        "on_device": [name for name, found in devices.items() if found - {"cpu", "meta"}],
    }


def _apart(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of no buffer, extra state or part of another module."""
    known = {*module._buffers.keys() - module._non_persistent_buffers_set, "_extra_state"}
    parts = tuple(f"{name}." for name in module._modules)
    return [name for name in names if name not in known and not name.startswith(parts)]


def _take(module: nn.Module, name: str, told: Mapping[str, Any], device: torch.device) -> None:
    """Let a module have what it wrote, as ``load_state_dict`` does: with its buffers, which have
    their values by now. Raises ``ValueError`` for what it does not take.
    """
    state: OrderedDict[str, Any] = OrderedDict()
    for own, buffer in module._buffers.items():
        is_kept = own not in module._non_persistent_buffers_set
        if is_kept and buffer is not None and not buffer.is_inference():
            state[own] = buffer
    for own, value in told["state"].items():
        moves = own in told["on_device"]
        state[own] = tree_map_only(torch.Tensor, lambda x: x.to(device), value) if moves else value
    errors: list[str] = []
    module._load_from_state_dict(state, "", {**told["metadata"]}, False, [], [], errors)
    if errors:
        raise ValueError(f"{name} does not take what was saved of it: {'; '.join(errors)}")
    for hook in [*module._load_state_dict_post_hooks.values()]:
        hook(module, _IncompatibleKeys([], []))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
