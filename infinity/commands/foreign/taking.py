"""State of torch's AdamW, by the names of parameters, into an offloaded model that has its weights
already: checked against it first, then written to its tiers, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.optim.rule import OF_MEMBERS
from infinity.optim.torch_optimizer.state import IN_COMPONENTS
from infinity.values.checkpoint_tensors import CheckpointTensor, checkpoint_tensors_of
from infinity.values.component_bytes import ComponentBytes, components_of_tensor
from infinity.values.loading import absent_state, check_fits, restore_scalars
from infinity.values.persistence import FORMAT, TrainingState
from swap.interruptions.mixture import Scope
from swap.storage.components import as_bytes

KEPT_BY = "torch.optim.adamw.AdamW"
"""Whose state this is, as checkpoints say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenState:
    """``moments`` by component and parameter, in float32; ``groups`` are those of the optimizer
    that it is for, one for one, with the names of parameters as ``params``. ``path``: where it is
    from.
    """

    moments: Mapping[str, Mapping[str, torch.Tensor]]
    steps: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    path: Path


def check_given(training: TrainingState, given: GivenState) -> None:
    """Raises ``ValueError`` naming what is not for this model and its optimizer."""
    leaves = {leaf.name: leaf for leaf in _leaves(training)}
    for component, moments in given.moments.items():
        for name, values in moments.items():
            shape = tuple(leaves[name].shape) if name in leaves else None
            if tuple(values.shape) != shape:
                raise ValueError(
                    f"{component} of {name} has shape {tuple(values.shape)} in {given.path}, "
                    f"{shape} in the model"
                )
    check_fits(training, _described(training, given), given.path)


def take_given(training: TrainingState, given: GivenState) -> None:
    """Let training go on from this state and its options; the update must be flushed. Weights stay.
    A failure leaves the state mixed, see ``swap.interruptions.mixture``.

    Raises as ``check_given``, before anything is changed.
    """
    check_given(training, given)
    with training.state.mixture.changing(f"taking the state in {given.path}") as change:
        change.begin(Scope(state=frozenset(record.index for record in training.records)))
        _take(training, given)


def _take(training: TrainingState, given: GivenState) -> None:
    saved = _described(training, given)
    for absent in absent_state(training, saved):
        training.state.components.zero(absent)
    for leaf, component in _components(training):
        found = given.moments.get(component.component.name, {}).get(leaf.name)
        if found is not None:
            component.write(0, as_bytes(found.reshape(-1).to(component.dtype)).data)
    restore_scalars(training, saved, given.path)
    for group, options in zip(training.optimizer.param_groups, given.groups, strict=True):
        group.update({key: value for key, value in options.items() if key not in OF_MEMBERS})


def _leaves(training: TrainingState) -> list[CheckpointTensor]:
    return checkpoint_tensors_of(training.model, training.records)


def _components(training: TrainingState) -> Iterable[tuple[CheckpointTensor, ComponentBytes]]:
    for leaf in _leaves(training):
        for component in components_of_tensor(training.state, leaf, None):
            yield leaf, component


def _described(training: TrainingState, given: GivenState) -> dict[str, Any]:
    """As checkpoints say it, see ``infinity.values.persistence``."""
    leaves = _leaves(training)
    kept = {
        leaf.name: [part for part, moments in given.moments.items() if leaf.name in moments]
        for leaf in leaves
    }
    return {
        "format": FORMAT,
        "steps": {leaf.name: given.steps.get(leaf.name, 0) for leaf in leaves},
        "planes": {name: ["weight", *parts] for name, parts in kept.items()},
        "shapes": {leaf.name: list(leaf.shape) for leaf in leaves},
        "dtypes": {leaf.name: leaf.first.spec.dtype for leaf in leaves},
        "groups": list(given.groups),
        "optimizer_class": KEPT_BY,
        "plane_dtypes": {name: dict.fromkeys(parts, torch.float32) for name, parts in kept.items()},
        "state_dtype": torch.float32,
        "state": None,
        "parts": {leaf.name: [part.numel for part in leaf.parts] for leaf in leaves},
        "loss_scale": None,
        "small_state": {
            name: {"step": torch.tensor(float(given.steps[name])), IN_COMPONENTS: parts}
            for name, parts in kept.items()
            if parts
        },
    }
