"""Weights of an offloaded model to a folder that ``from_pretrained`` loads, and back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

import checkpoint
import infinity
from infinity.tiling.weight import TiledWeight, whole_of
from infinity.values.leaves import Leaf, leaves_of
from infinity.values.load_targets import literal
from infinity.values.module_state import persistent_buffers

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def write_model(offloaded: infinity.OffloadedModel, folder: Path) -> None:
    """Weights and configuration of the model; of one with adapters, the adapters alone."""
    model: Any = offloaded.model
    if adapters := adapters_of(model):
        _write_adapters(offloaded, adapters, folder)
        return
    if isinstance(model, PreTrainedModel):
        _write_configuration(model, folder)
    offloaded.export(folder)


def _write_configuration(model: Any, folder: Path) -> None:
    """As ``save_pretrained`` does before it comes to the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def adapters_of(model: Any) -> list[str]:
    """Names of the adapters that PEFT has put into the model."""
    return list(getattr(model, "peft_config", None) or ())


def _write_adapters(offloaded: infinity.OffloadedModel, adapters: list[str], folder: Path) -> None:
    model: Any = offloaded.model
    chosen = {
        leaf.name: [part.parameter for part in leaf.parts]
        for leaf in leaves_of(model, offloaded._training.records)
        if leaf.first.parameter.requires_grad or _belongs(leaf.name, adapters)
    }
    with offloaded.gathered([tile for tiles in chosen.values() for tile in tiles]):
        values = {name: whole_of(tiles) for name, tiles in chosen.items()}
        values |= persistent_buffers(model)
        model.save_pretrained(folder, state_dict=values)


def _belongs(name: str, adapters: list[str]) -> bool:
    return any(adapter in name.split(".") for adapter in adapters)


def read_state(offloaded: infinity.OffloadedModel, saved: Path) -> None:
    """Give the trained weights and the buffers the values that a checkpoint of ours has; one
    parameter at a time. Moments and step counts stay.
    """
    for leaf in leaves_of(offloaded.model, offloaded._training.records):
        if leaf.first.spec.trainable:
            _set(offloaded, leaf, _saved(saved, leaf.name))
    for name, buffer in persistent_buffers(offloaded.model).items():
        buffer.copy_(_saved(saved, name))


def _saved(path: Path, name: str) -> torch.Tensor:
    value: torch.Tensor = checkpoint.load(path, only=[literal(f"model.{name}")])["model"][name]
    return value


def read_folder(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Give all weights and buffers the values in the safetensors files of ``folder``; returns the
    names for which there are none.

    Raises ``ValueError`` for a shape that does not match.
    """
    targets: dict[str, Leaf | torch.Tensor] = {**_leaves_by_name(offloaded)}
    targets |= persistent_buffers(offloaded.model)
    done = set()
    for name, value in _tensors_in(folder):
        if name in targets and id(targets[name]) not in done:
            _fill(offloaded, name, targets[name], value)
            done.add(id(targets[name]))
    return [name for name, target in targets.items() if id(target) not in done]


def _leaves_by_name(offloaded: infinity.OffloadedModel) -> dict[str, Leaf]:
    """By every name that the model has for them."""
    model = offloaded.model
    leaves = leaves_of(model, offloaded._training.records)
    by_first = {id(leaf.first.parameter): leaf for leaf in leaves}
    named = {leaf.name: leaf for leaf in leaves}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        leaf = by_first.get(id(parameter))
        if leaf is not None and len(leaf.parts) == 1:
            named[name] = leaf
    for prefix, module in model.named_modules():
        for own, value in vars(module).items():
            if isinstance(value, TiledWeight):
                named[f"{prefix}.{own}"] = by_first[id(value.tiles[0])]
    return named


def _fill(
    offloaded: infinity.OffloadedModel, name: str, target: Leaf | torch.Tensor, value: torch.Tensor
) -> None:
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the file, {tuple(target.shape)} in the model"
        )
    if isinstance(target, Leaf):
        _set(offloaded, target, value)
    else:
        target.copy_(value)


def _set(offloaded: infinity.OffloadedModel, leaf: Leaf, values: torch.Tensor) -> None:
    flat, at = values.reshape(-1), 0
    for part in leaf.parts:
        parameter = part.parameter
        with offloaded.gathered([parameter], modify=True), torch.no_grad():
            parameter.copy_(flat[at : at + part.numel].view(parameter.shape))
        at += part.numel


def _tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _files_of(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _files_of(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if (folder / _WHOLE).is_file() or not index.is_file():
        return [folder / _WHOLE]
    weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


def has_weights(folder: Path) -> bool:
    """Whether ``read_folder`` finds something there."""
    return (folder / _WHOLE).is_file() or (folder / _INDEX).is_file()
