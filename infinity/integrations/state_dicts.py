"""The weights of an offloaded model as a mapping that reads them when they are asked for, one at a
time: for what iterates over a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

import infinity
from infinity.model import training_of
from infinity.values.checkpoint_tensors import checkpoint_tensors_of
from infinity.values.module_state import persistent_buffers


class OffloadedStateDict(Mapping[str, torch.Tensor]):
    """Names as in ``state_dict()``, tied weights under the first of theirs; what is asked for is a
    copy on the CPU. Valid inside the block; follows the training.
    """

    def __init__(self, offloaded: infinity.OffloadedModel) -> None:
        self._offloaded = offloaded
        training = training_of(offloaded)
        self._leaves = {
            leaf.name: leaf for leaf in checkpoint_tensors_of(training.model, training.records)
        }

    def is_of(self, offloaded: infinity.OffloadedModel) -> bool:
        return self._offloaded is offloaded

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._leaves:
            return persistent_buffers(self._offloaded.model)[name].detach().cpu()
        leaf = self._leaves[name]
        parts = [part.parameter for part in leaf.parts]
        with self._offloaded.gathered(parts):
            copies = [part.detach().cpu().clone() for part in parts]
        if len(copies) == 1:
            return copies[0]
        return torch.cat([copy.reshape(-1) for copy in copies]).reshape(leaf.shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._leaves
        yield from persistent_buffers(self._offloaded.model)

    def __len__(self) -> int:
        return len(self._leaves) + len(persistent_buffers(self._offloaded.model))


class WeightsFolder(Mapping[str, torch.Tensor]):
    """The tensors in safetensors files, whole or in shards with an index; read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as opened:
            value: torch.Tensor = opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def set_values(offloaded: infinity.OffloadedModel, values: Mapping[str, torch.Tensor]) -> list[str]:
    """Give weights and buffers the values of the same names, one parameter at a time; returns the
    names that the model has no tensor for. Moments and step counts stay.

    Raises ``ValueError`` naming a tensor that is missing, or of another shape, before any is set.
    """
    training = training_of(offloaded)
    leaves = {leaf.name: leaf for leaf in checkpoint_tensors_of(training.model, training.records)}
    buffers = persistent_buffers(training.model)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    for name, shape in shapes.items():
        if name not in values:
            raise ValueError(f"there are no values for {name}, which the model has")
        if tuple(values[name].shape) != tuple(shape):
            raise ValueError(
                f"{name} is of shape {tuple(values[name].shape)}, in the model of {tuple(shape)}"
            )
    for name, leaf in leaves.items():
        flat, at = values[name].detach().reshape(-1), 0
        for part in leaf.parts:
            parameter = part.parameter
            with offloaded.gathered([parameter], modify=True), torch.no_grad():
                parameter.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    return [name for name in values if name not in shapes]
