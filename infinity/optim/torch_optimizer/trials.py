"""Trials of an optimizer on small parameters: of all of them together, and of each alone."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.optim.torch_optimizer.attributes import Attributes
from infinity.optim.torch_optimizer.values import same
from infinity.optim.torch_optimizer.workers import (
    Step,
    advance,
    forget_hooks,
    like,
    options_at,
    options_in,
    plain_step,
    shape_like,
)

SCALES = (30.0, 0.01, 1.0)
"""Of gradients in the trial: with norms above and below what optimizers clip to."""
COUNT = 2_520_000
"""Of steps, that most periods of round numbers end at: a multiple of all numbers up to ten, of 100
and of 1000.
"""
NOT_FINITE = {5: math.inf, 6: math.nan}
"""The numbers of steps in which one gradient is not finite."""
_WITHOUT = {1: 0, 4: 1}
"""Not every parameter has a gradient in every step: which of a group's has none, by step."""
Place = tuple[int, int | None, str]
"""A group; a parameter in it, or None for the group itself; the name of a value there."""


class Together:
    """The optimizer as it is, with throw-away parameters in the places of all that it has."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        attributes: Attributes,
        groups: list[dict[str, Any]],
        *,
        has_state: bool,
    ) -> None:
        memo: dict[int, Any] = {}
        self.groups = []
        for group in groups:
            leaves = [like(leaf, leaf.detach().clone()) for leaf in group["params"]]
            self.groups.append(options_in(group, memo) | {"params": leaves})
        self.worker = object.__new__(type(optimizer))
        self.absent = attributes.absent
        vars(self.worker).update(attributes.copies(self.worker, memo))
        forget_hooks(self.worker)
        self.worker.param_groups = self.groups
        self.worker.state = defaultdict(dict)
        if has_state:
            make: Any = type(optimizer)
            again = [options_in(group) | {"params": group["params"]} for group in self.groups]
            self.worker.state = make(again, **optimizer.defaults).state

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for group in self.groups for leaf in group["params"]]

    def take(self, number: int) -> None:
        for group, found in zip(self.groups, _gradients(self.groups, number), strict=True):
            for leaf, gradient in zip(group["params"], found, strict=True):
                leaf.grad = gradient
        plain_step(self.worker)

    def counts(self) -> dict[Place, int]:
        """All whole numbers that it keeps."""
        return {
            (at, position, key): count
            for at, group in enumerate(self.groups)
            for position, kept in [(None, group), *enumerate(map(self._state, group["params"]))]
            for key, value in kept.items()
            if (count := _whole(value)) is not None
        }

    def set_count(self, place: Place, count: int) -> None:
        at, position, key = place
        group = self.groups[at]
        kept = group if position is None else self._state(group["params"][position])
        kept[key] = _with_count(kept[key], count)

    def _state(self, leaf: torch.Tensor) -> dict[str, Any]:
        kept: dict[str, Any] = self.worker.state.get(leaf, {})
        return kept


class Alone:
    """Each parameter in a step of its own, as ``TorchRule`` has it."""

    def __init__(self, groups: list[dict[str, Any]], trial: Step, step: Step) -> None:
        self._trial = trial
        self._step = step
        self._groups = groups
        self._states: dict[int, dict[str, Any]] = defaultdict(dict)
        self.changed: set[str] = set()

    def take(self, number: int) -> None:
        for group, found in zip(self._groups, _gradients(self._groups, number), strict=True):
            options = options_in(group)
            for position, leaf in enumerate(group["params"]):
                gradient = found[position]
                if gradient is None:
                    continue
                leaf.grad = gradient
                own = copy.deepcopy({**options_at(options, position)})
                state, _ = self._trial(leaf, own, self._states[id(leaf)])
                self._states[id(leaf)] = dict(state)
            has_gradients = any(gradient is not None for gradient in found)
            self.changed |= advance(self._step, group, has_gradients=has_gradients)

    def set_count(self, place: Place, count: int) -> None:
        at, position, key = place
        kept = self._groups[at]
        if position is not None:
            kept = self._states[id(kept["params"][position])].get("small", {})
        if key in kept:
            kept[key] = _with_count(kept[key], count)

    def is_like(self, other: Together) -> bool:
        for ours, theirs in zip(self._groups, other.groups, strict=True):
            if not ours["params"]:
                continue  # whatever it keeps is for nothing
            if not all(map(same, ours["params"], theirs["params"])):
                return False
            if not same(options_in(ours), options_in(theirs)):
                return False
        return True


def small_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    memo: dict[int, Any] = {}
    return [_small_group(group, memo) for group in optimizer.param_groups]


def _small_group(group: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """With two throw-away parameters for each number of dimensions in it."""
    rng = torch.Generator().manual_seed(1)
    parameters = group["params"]
    by_dimensions: dict[int, list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        by_dimensions[max(1, parameter.dim())].append(position)
    chosen = [
        at for d in sorted(by_dimensions) for at in (by_dimensions[d][0], by_dimensions[d][-1])
    ]
    leaves = []
    for at in chosen:
        shape = shape_like(max(1, parameters[at].dim()))
        leaves.append(like(parameters[at], _randn(shape, rng)))
    small = options_in(group, memo) | {"params": leaves}
    if small.get("param_names") is not None:
        small["param_names"] = [small["param_names"][at] for at in chosen]
    return small


def _gradients(groups: Sequence[Mapping[str, Any]], number: int) -> list[list[torch.Tensor | None]]:
    """Those of the parameters in each group for the step of that number."""
    rng = torch.Generator().manual_seed(number)
    found: list[list[torch.Tensor | None]] = []
    for group in groups:
        scale = SCALES[number % len(SCALES)]
        gradients = [scale * _randn(leaf.shape, rng) for leaf in group["params"]]
        if gradients and not any(map(len, found)) and number in NOT_FINITE:
            gradients[0].view(-1)[0] = NOT_FINITE[number]
        without = _WITHOUT.get(number)
        if without is not None:  # a group may be empty
            found.append([*gradients])
            found[-1][without : without + 1] = [None] * len(gradients[:1])
        else:
            found.append([*gradients])
    return found


def _whole(value: Any) -> int | None:
    """``value`` as the whole number that it is; None if it is none."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and value.dtype in _WHOLE_IN
        return _whole(value.item()) if is_one else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value == int(value) else None


_WHOLE_IN = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What has place for a large count."""


def _with_count(value: Any, count: int) -> Any:
    return value.fill_(count) if isinstance(value, torch.Tensor) else type(value)(count)


def _randn(shape: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
