"""What a model has values for, by every name that its state dict would have for it: buffers, and
weights, which may be in tiles.
"""

from __future__ import annotations

import torch
from torch import nn

import infinity
from infinity.model import training_of
from infinity.tiling.weight import TiledWeight
from infinity.tiling.wholes import joined_of
from infinity.values.checkpoint_tensors import CheckpointTensor, checkpoint_tensors_of

Target = CheckpointTensor | torch.Tensor


def targets_by_name(offloaded: infinity.OffloadedModel) -> dict[str, Target]:
    """Those of tied weights and shared modules are the same objects."""
    targets: dict[str, Target] = {**_leaves_by_name(offloaded)}
    for prefix, module in offloaded.model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                targets[f"{prefix}.{name}" if prefix else name] = buffer
    return targets


def _leaves_by_name(offloaded: infinity.OffloadedModel) -> dict[str, CheckpointTensor]:
    """By every name that the model has for them."""
    model = offloaded.model
    leaves = checkpoint_tensors_of(model, training_of(offloaded).records)
    by_first = {id(leaf.first.parameter): leaf for leaf in leaves}
    named = {leaf.name: leaf for leaf in leaves}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        leaf = by_first.get(id(parameter))
        if leaf is not None and len(leaf.parts) == 1:
            named[name] = leaf
    for prefix, module in model.named_modules():
        for own, value in vars(module).items():
            if isinstance(value, TiledWeight):
                named[f"{prefix}.{own}" if prefix else own] = by_first[id(value.tiles[0])]
    return named


def fill(
    offloaded: infinity.OffloadedModel, name: str, target: Target, value: torch.Tensor
) -> None:
    """Give it this value. Raises ``ValueError`` naming it for one of another shape."""
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the file, {tuple(target.shape)} in the model"
        )
    if isinstance(target, CheckpointTensor):
        set_values(offloaded, target, value)
    else:
        target.copy_(value)


def set_values(
    offloaded: infinity.OffloadedModel, leaf: CheckpointTensor, values: torch.Tensor
) -> None:
    """One tile at a time; with all the precision that a master of it keeps."""
    flat, at = values.reshape(-1), 0
    for part in leaf.parts:
        parameter, own = part.parameter, flat[at : at + part.numel]
        with offloaded.gathered([parameter], modify=True), torch.no_grad():
            parameter.copy_(own.view(parameter.shape))
        if own.dtype.itemsize > parameter.dtype.itemsize and part.spec.trainable:
            training_of(offloaded).state.fill(part.index, own)
        at += part.numel


def parameters_of(target: Target) -> list[nn.Parameter]:
    """Those that have the values of a weight; none for a buffer."""
    return [part.parameter for part in target.parts] if isinstance(target, CheckpointTensor) else []


def value_of(target: Target) -> torch.Tensor:
    """Inside ``gathered`` of its parameters; a copy where it is in tiles."""
    if not isinstance(target, CheckpointTensor):
        return target
    if len(target.parts) == 1:
        return target.first.parameter.detach()
    return joined_of(parameters_of(target))
