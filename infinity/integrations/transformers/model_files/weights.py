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
from infinity.integrations.state_dicts import OffloadedStateDict
from infinity.integrations.transformers.model_files.adapters import (
    adapter_files,
    adapters_of,
    read_adapters,
    write_adapters,
)
from infinity.integrations.transformers.model_files.targets import (
    fill,
    set_values,
    targets_by_name,
)
from infinity.values.checkpoint_tensors import checkpoint_tensors_of
from infinity.values.load_targets import literal
from infinity.values.module_state import persistent_buffers

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SAVED_ANYHOW: Mapping[str, tuple[Any, ...]] = {
    "is_main_process": (True,),
    "safe_serialization": (True, None),
    "push_to_hub": (False, None),
    "state_dict": (None,),
    "token": (None,),
}
"""Options of ``save_pretrained``, and the values that say what is done anyhow."""


def write_model(
    offloaded: infinity.OffloadedModel, folder: Path, options: Mapping[str, Any] | None = None
) -> None:
    """Weights and configuration of the model; of one with adapters, the adapters alone. ``options``
    are those of its ``save_pretrained``. Raises ``ValueError`` naming one that cannot be honoured.
    """
    model: Any = offloaded.model
    if adapters := adapters_of(model):
        write_adapters(offloaded, adapters, folder, options or {})
        return
    for name, value in (options or {}).items():
        if not _is_done_anyhow(offloaded, name, value):
            raise ValueError(
                f"save_pretrained({name}={value!r}) cannot be honoured while the model is "
                "offloaded: leave it out, or give the model its values in memory first (close() "
                "of the trainer)"
            )
    if isinstance(model, PreTrainedModel):
        _write_configuration(model, folder)
    offloaded.export(folder)


def _is_done_anyhow(offloaded: infinity.OffloadedModel, name: str, value: Any) -> bool:
    """Also what accelerate's programs pass: the mapping of this model, and a function for files,
    of which there are none but those of safetensors.
    """
    if isinstance(value, OffloadedStateDict):
        return name == "state_dict" and value.is_of(offloaded)
    if name == "save_function":
        return callable(value)
    return name in _SAVED_ANYHOW and any(value is known for known in _SAVED_ANYHOW[name])


def _write_configuration(model: Any, folder: Path) -> None:
    """As ``save_pretrained`` does before it comes to the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def read_state(offloaded: infinity.OffloadedModel, saved: Path) -> None:
    """Give the trained weights and the buffers the values that a checkpoint of ours has; one
    parameter at a time. Moments and step counts stay.
    """
    for leaf in checkpoint_tensors_of(offloaded.model, offloaded._training.records):
        if leaf.first.spec.trainable:
            set_values(offloaded, leaf, _saved(saved, leaf.name))
    for name, buffer in persistent_buffers(offloaded.model).items():
        buffer.copy_(_saved(saved, name))


def _saved(path: Path, name: str) -> torch.Tensor:
    value: torch.Tensor = checkpoint.load(path, only=[literal(f"model.{name}")])["model"][name]
    return value


def read_folder(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Give all weights and buffers the values in the safetensors files of ``folder``, or, where
    it has them, adapters theirs; returns the names for which there are none.

    Raises ``ValueError`` for a shape that does not match.
    """
    if files := adapter_files(folder, adapters_of(offloaded.model)):
        read_adapters(offloaded, files)
        return []
    targets = targets_by_name(offloaded)
    done = set()
    for name, value in _tensors_in(folder):
        if name in targets and id(targets[name]) not in done:
            fill(offloaded, name, targets[name], value)
            done.add(id(targets[name]))
    return [name for name, target in targets.items() if id(target) not in done]


def absent_from(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Names of weights and buffers that ``read_folder`` would find no values for."""
    if adapter_files(folder, adapters_of(offloaded.model)):
        return []
    targets, there = targets_by_name(offloaded), set()
    for file in _files_of(folder):
        if file.is_file():
            with safe_open(file, framework="pt") as opened:
                there |= {id(targets[name]) for name in targets.keys() & {*opened.keys()}}
    return [name for name, target in targets.items() if id(target) not in there]


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


def has_weights(model: nn.Module, folder: Path) -> bool:
    """Whether ``read_folder`` finds something there."""
    if adapter_files(folder, adapters_of(model)):
        return True
    return (folder / _WHOLE).is_file() or (folder / _INDEX).is_file()
