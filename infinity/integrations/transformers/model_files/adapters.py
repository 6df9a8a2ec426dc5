"""Adapters of PEFT in an offloaded model, to and from the files that PEFT has for them.

PEFT chooses itself what belongs to an adapter, from the whole state dict: it may be embeddings that
were resized, or what layers share. It is shown all of it, without values, to have it choose; the
values of these are read then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.integrations.state_dicts import replacing
from infinity.integrations.transformers.model_files.targets import (
    Target,
    fill,
    parameters_of,
    targets_by_name,
    value_of,
)
from infinity.values.checkpoint_tensors import CheckpointTensor

_WEIGHTS = "adapter_model.safetensors"
_OWN = "default"
"""The adapter whose files are in the folder itself; others have a folder of their name there."""

_PROMPT = ("prompt_embeddings",)
"""What PEFT loads into a prompt by itself."""


def adapters_of(model: Any) -> list[str]:
    """Names of the adapters that PEFT has put into the model."""
    return list(getattr(model, "peft_config", None) or ())


def adapter_files(folder: Path, adapters: list[str]) -> dict[str, Path]:
    """Those of the adapters that ``folder`` has."""
    files = {name: (folder if name == _OWN else folder / name) / _WEIGHTS for name in adapters}
    return {name: file for name, file in files.items() if file.is_file()}


def write_adapters(
    offloaded: infinity.OffloadedModel,
    adapters: list[str],
    folder: Path,
    options: Mapping[str, Any],
) -> None:
    """As ``save_pretrained`` does with these options."""
    model: Any = offloaded.model
    with _gathered(offloaded, adapters, modify=False) as values:
        # That of the class: the model itself may have one that comes here.
        type(model).save_pretrained(model, folder, **{"state_dict": values, **options})


def read_adapters(offloaded: infinity.OffloadedModel, files: Mapping[str, Path]) -> None:
    """Give adapters the values in their files. Raises ``ValueError`` naming one that the model has
    no place for.
    """
    from peft import set_peft_model_state_dict

    model: Any = offloaded.model
    with _gathered(offloaded, list(files), modify=True) as values:
        for name, file in files.items():
            takes_itself = model.peft_config[name].is_prompt_learning
            load = _Load(offloaded, file, ignored=_PROMPT if takes_itself else ())
            with _instead(model, state_dict=lambda: values, load_state_dict=load):
                set_peft_model_state_dict(model, load_file(file), adapter_name=name)


class _Load:
    """``load_state_dict`` of a part of a model."""

    def __init__(
        self, offloaded: infinity.OffloadedModel, file: Path, ignored: Sequence[str]
    ) -> None:
        self._offloaded = offloaded
        self._targets = targets_by_name(offloaded)
        self._file = file
        self._ignored = ignored

    def __call__(self, state: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        state = {name: value for name, value in state.items() if name not in self._ignored}
        for name, value in state.items():
            own = self._targets.get(name)
            if own is None or tuple(own.shape) != tuple(value.shape):
                theirs = "no place" if own is None else f"one of shape {tuple(own.shape)}"
                raise ValueError(
                    f"{self._file} has {name} of shape {tuple(value.shape)}, for which the model "
                    f"has {theirs}; resume with adapters like those that were saved"
                )
        targets = [self._targets[name] for name in state]
        with replacing(self._offloaded, f"reading {self._file}", targets):
            for name, value in state.items():
                fill(self._offloaded, name, self._targets[name], value)


@contextmanager
def _instead(model: nn.Module, **methods: Any) -> Iterator[None]:
    """Methods of this one model, which would read or write all of it."""
    model.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            model.__dict__.pop(name, None)


@contextmanager
def _gathered(
    offloaded: infinity.OffloadedModel, adapters: list[str], *, modify: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """What belongs to the adapters, in memory, by the names of a state dict."""
    targets = targets_by_name(offloaded)
    near = {name for name, target in targets.items() if _is_near(name, target, adapters)}
    with offloaded.gathered(_parameters(targets, near)):
        chosen = near | _chosen(offloaded.model, adapters, targets)
    with offloaded.gathered(_parameters(targets, chosen), modify=modify):
        yield {name: value_of(targets[name]) for name in targets if name in chosen}


def _is_near(name: str, target: Target, adapters: list[str]) -> bool:
    """Whether it is trained, or has the name of an adapter, or is a buffer."""
    if not isinstance(target, CheckpointTensor) or target.first.parameter.requires_grad:
        return True
    return any(adapter in name.split(".") for adapter in adapters)


def _chosen(model: nn.Module, adapters: list[str], targets: Mapping[str, Target]) -> set[str]:
    """Names of what PEFT would save as it is."""
    from peft import get_peft_model_state_dict

    shown = {name: _without_values(target) for name, target in targets.items()}
    names = {id(tensor): name for name, tensor in shown.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when it is saved
        found = [
            tensor
            for adapter in adapters
            for tensor in get_peft_model_state_dict(model, shown, adapter).values()
        ]
    return {names[id(tensor)] for tensor in found if id(tensor) in names}


def _without_values(target: Target) -> torch.Tensor:
    dtype = target.first.parameter.dtype if isinstance(target, CheckpointTensor) else target.dtype
    return torch.zeros((), dtype=dtype).expand(target.shape)


def _parameters(targets: Mapping[str, Target], names: set[str]) -> list[nn.Parameter]:
    found = {id(p): p for name in names for p in parameters_of(targets[name])}
    return list(found.values())
