"""What a step is made of: options by parameter, step counts, the clipping coefficient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from infinity.optim.thread_settings import ThreadSettings
from infinity.optim.torch_optimizer.workers import kind_in_updates, options_at, options_in
from infinity.parameters.offloaded.becoming import attributes_of
from infinity.parameters.records import Record
from swap.plan.rules import ParameterUpdate


def options_of(
    groups: Sequence[Mapping[str, Any]],
    index_of: Callable[[torch.Tensor], int],
    names: Collection[str] | None,
    name_of: Callable[[int], str],
) -> dict[int, Mapping[str, Any]]:
    """The options of every parameter's group, copied: later changes are for later steps. Those of
    ``names``, or all.

    Raises ``ValueError`` with the name of a parameter that is there twice.
    """
    options: dict[int, Mapping[str, Any]] = {}
    for group in groups:
        frozen = options_in(group, names=names)
        for position, parameter in enumerate(group["params"]):
            index = index_of(parameter)
            if index in options:
                raise listed_twice(name_of(index), "offloaded.optimizer.param_groups")
            options[index] = options_at(frozen, position)
    return options


def listed_twice(name: str, groups: str) -> ValueError:
    """A parameter that is twice in ``groups``: torch updates it twice in each step, at most with a
    warning, and here an update is of all of a parameter.
    """
    return ValueError(
        f"{name} is twice in {groups}, and in memory each step would update it twice; leave it "
        "there once (weights that are tied are one parameter)"
    )


def updates_for(
    indices: Sequence[int] | None,
    options: Mapping[int, Mapping[str, Any]],
    records: Sequence[Record],
    steps: Sequence[int],
) -> dict[int, ParameterUpdate]:
    """An update for each of ``indices`` (None: all that have options), by a step that this thread
    takes; ``steps`` counts those done.

    Raises ``ValueError`` naming a parameter that is in no group.
    """
    updates = {}
    within = ThreadSettings.here().set
    for index in options if indices is None else indices:
        record = records[index]
        if index not in options:
            raise ValueError(f"{record.name} is in no group of offloaded.optimizer.param_groups")
        updates[index] = ParameterUpdate(
            parameter=index,
            step=steps[index] + 1,
            shape=record.kept_shape,
            options=options[index],
            first=record.first,
            attributes=attributes_of(record.parameter),
            kind=kind_in_updates(record.kind),
            within=within,
        )
    return updates


def as_norm(norm: float) -> torch.Tensor:
    """What users get of a norm: 0-d float32 on the CPU."""
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


def clip_coefficient(norm: float, max_norm: float) -> float:
    """As ``torch.nn.utils.clip_grad_norm_``; a norm that is not finite makes the update so, too."""
    return min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
