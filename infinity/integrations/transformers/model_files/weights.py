"""Weights of an offloaded model to a folder that ``from_pretrained`` loads, and back from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

import checkpoint
import infinity
from infinity.integrations.state_dicts import OffloadedStateDict, replacing
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
from infinity.values.initial.weight_files import INDEX, WHOLE, WeightFolder, files_of
from infinity.values.load_targets import literal
from infinity.values.module_state import persistent_buffers

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
    leaves = checkpoint_tensors_of(offloaded.model, offloaded._training.records)
    trained = [leaf for leaf in leaves if leaf.first.spec.trainable]
    with replacing(offloaded, f"reading {saved}", trained):
        for leaf in trained:
            set_values(offloaded, leaf, _saved(saved, leaf.name))
        for name, buffer in persistent_buffers(offloaded.model).items():
            buffer.copy_(_saved(saved, name))


def _saved(path: Path, name: str) -> torch.Tensor:
    value: torch.Tensor = checkpoint.load(path, only=[literal(f"model.{name}")])["model"][name]
    return value


def read_folder(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Give all weights and buffers the values in the safetensors files of ``folder``, or, where
    it has them, adapters theirs; returns the names for which there are none.

    Raises ``ValueError`` for a shape that does not match, and for files that are none.
    """
    if adapters := adapter_files(folder, adapters_of(offloaded.model)):
        read_adapters(offloaded, adapters)
        return []
    targets = targets_by_name(offloaded)
    done = set()
    files = WeightFolder(folder)
    found = [name for name in files.names if name in targets]
    with replacing(offloaded, f"reading {folder}", [targets[name] for name in found]):
        for name in found:
            if id(targets[name]) not in done:
                fill(offloaded, name, targets[name], files.read(name))
                done.add(id(targets[name]))
    files.close()
    return [name for name, target in targets.items() if id(target) not in done]


def absent_from(offloaded: infinity.OffloadedModel, folder: Path) -> list[str]:
    """Names of weights and buffers that ``read_folder`` would find no values for."""
    if adapter_files(folder, adapters_of(offloaded.model)):
        return []
    targets = targets_by_name(offloaded)
    there = {id(targets[name]) for name in targets.keys() & WeightFolder(folder).names.keys()}
    return [name for name, target in targets.items() if id(target) not in there]


def check_weights(model: nn.Module, folder: Path) -> None:
    """Raises ``ValueError`` where ``read_folder`` finds nothing there."""
    if adapter_files(folder, adapters_of(model)):
        return
    if (folder / WHOLE).is_file() or (folder / INDEX).is_file():
        return
    text = f"Can't find a valid checkpoint at {folder}"
    try:
        files_of(folder)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{text}: {error}") from error
    raise ValueError(text)
