"""The weights of an offloaded model as a mapping that reads them when they are asked for, one at a
time: for what iterates over a state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.model import training_of
from infinity.values.checkpoint_tensors import CheckpointTensor, checkpoint_tensors_of
from infinity.values.initial.weight_files import WeightFolder
from infinity.values.module_state import persistent_buffers, set_module_states, states_within
from swap.interruptions.mixture import Scope


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


class WeightsOfFolder(Mapping[str, torch.Tensor]):
    """The tensors in safetensors files, whole or in shards with an index; read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = WeightFolder(folder)

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._files.read(name)
        finally:
            self._files.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.names)

    def __len__(self) -> int:
        return len(self._files.names)


@contextmanager
def replacing(
    offloaded: infinity.OffloadedModel, what: str, targets: Iterable[object]
) -> Iterator[None]:
    """Values of weights among ``targets`` are replaced inside, one after the other. What stops that
    leaves them mixed, see ``swap.interruptions.mixture``; ``what`` names it then.
    """
    weights = (target for target in targets if isinstance(target, CheckpointTensor))
    indices = frozenset(part.index for leaf in weights for part in leaf.parts)
    with training_of(offloaded).state.mixture.changing(what) as change:
        change.begin(Scope(values=indices))
        yield


def set_values(
    offloaded: infinity.OffloadedModel, values: Mapping[str, torch.Tensor], *, strict: bool
) -> None:
    """Give weights, buffers and what else modules have in state dicts the values of the same names,
    one parameter at a time. Moments and step counts stay.

    Raises ``ValueError`` naming a tensor of another shape, and where ``strict`` one that either
    side has not, before any is set.
    """
    training = training_of(offloaded)
    leaves = {leaf.name: leaf for leaf in checkpoint_tensors_of(training.model, training.records)}
    buffers = persistent_buffers(training.model)
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    states, told = states_within(training.model, values)
    if strict:
        _check_names(training.model, shapes, [name for name in values if name not in told])
    given = values.keys() & shapes.keys()
    for name in sorted(given):
        if tuple(values[name].shape) != shapes[name]:
            raise ValueError(
                f"{name} is of shape {tuple(values[name].shape)}, in the model of {shapes[name]}"
            )
    chosen = [leaf for name, leaf in leaves.items() if name in given]
    with replacing(offloaded, "setting the values of a state dict", chosen):
        for leaf in chosen:
            _set(offloaded, leaf, values[leaf.name])
        for name, buffer in buffers.items():
            if name in given:
                buffer.copy_(values[name])
    set_module_states(training.model, states, training.state.device)


def _set(offloaded: infinity.OffloadedModel, leaf: CheckpointTensor, values: torch.Tensor) -> None:
    flat, at = values.detach().reshape(-1), 0
    for part in leaf.parts:
        parameter = part.parameter
        with offloaded.gathered([parameter], modify=True), torch.no_grad():
            parameter.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()


def _check_names(model: nn.Module, needed: Iterable[str], given: Iterable[str]) -> None:
    """A weight that has several names may be given by all of them."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    problems = [f"there are no values for {name}" for name in needed if name not in {*given}]
    problems += [f"the model has no {name}" for name in given if name not in {*needed} | aliases]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{'; '.join(problems[:5])}{more}; strict=False sets what both have")
