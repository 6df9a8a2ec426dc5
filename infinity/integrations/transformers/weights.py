"""Weights of an offloaded model to a folder that ``from_pretrained`` loads, and back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

import checkpoint
import infinity
from infinity.values.leaves import leaves_of
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
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or _belongs(name, adapters)
    }
    with offloaded.gathered(list(chosen.values())):
        values = {name: parameter.detach() for name, parameter in chosen.items()}
        values |= persistent_buffers(model)
        model.save_pretrained(folder, state_dict=values)


def _belongs(name: str, adapters: list[str]) -> bool:
    return any(adapter in name.split(".") for adapter in adapters)


def read_state(offloaded: infinity.OffloadedModel, saved: Path) -> None:
    """Give the trained weights and the buffers the values that a checkpoint of ours has; one
    parameter at a time. Moments and step counts stay.
    """
    for leaf in leaves_of(offloaded.model, offloaded._training.records):
        if not leaf.first.spec.trainable:
            continue
        values = _saved(saved, leaf.name).reshape(-1)
        at = 0
        for part in leaf.parts:
            _set(offloaded, part.parameter, values[at : at + part.numel])
            at += part.numel
    for name, buffer in persistent_buffers(offloaded.model).items():
        buffer.copy_(_saved(saved, name))


def _saved(path: Path, name: str) -> torch.Tensor:
    value: torch.Tensor = checkpoint.load(path, only=[literal(f"model.{name}")])["model"][name]
    return value


def read_folder(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Give all weights and buffers the values in the safetensors files of ``folder``; returns the
    names for which there are none.

    Raises ``ValueError`` for a model with tiled layers, and for a shape that does not match.
    """
    model = offloaded.model
    if any(len(leaf.parts) > 1 for leaf in leaves_of(model, offloaded._training.records)):
        raise ValueError(
            f"{folder} has plain weights, which cannot be put into layers that are tiled; leave "
            "max_parameter_bytes out, or pass weights= so that they are read on the way in"
        )
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= persistent_buffers(model)
    done = set()
    for name, value in _tensors_in(folder):
        if name in tensors and id(tensors[name]) not in done:
            _fill(offloaded, name, tensors[name], value)
            done.add(id(tensors[name]))
    return [name for name, tensor in tensors.items() if id(tensor) not in done]


def _fill(
    offloaded: infinity.OffloadedModel, name: str, tensor: torch.Tensor, value: torch.Tensor
) -> None:
    if value.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the file, {tuple(tensor.shape)} in the model"
        )
    if isinstance(tensor, nn.Parameter):
        _set(offloaded, tensor, value)
    else:
        tensor.copy_(value)


def _set(offloaded: infinity.OffloadedModel, parameter: torch.Tensor, value: torch.Tensor) -> None:
    with offloaded.gathered([parameter], modify=True), torch.no_grad():
        parameter.copy_(value.reshape(parameter.shape))


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
