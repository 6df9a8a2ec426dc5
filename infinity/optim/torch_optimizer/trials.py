"""Trials of an optimizer on small parameters: of all of them together, and of each alone."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity.optim.torch_optimizer.attributes import Attributes
from infinity.optim.torch_optimizer.values import same, varied, whole_number, with_count
from infinity.optim.torch_optimizer.workers import (
    Step,
    advance,
    forget_hooks,
    kind_in_updates,
    like,
    options_at,
    options_in,
    plain_step,
    shape_like,
    values_of,
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
Groups = list[dict[str, Any]]
Gradients = list[list[torch.Tensor | None]]
"""Those of the parameters in each group."""
_FACTORS = (0.75, 0.5, 0.875)
"""Of options that are varied, by group: those of neighbours come to differ."""


class Together:
    """The optimizer as it is, with throw-away parameters in the places of all that it has."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        attributes: Attributes,
        groups: Groups,
        *,
        has_state: bool,
    ) -> None:
        memo: dict[int, Any] = {}
        self.groups = []
        for group in groups:
            leaves = [like(p, values_of(p).clone(), type(p)) for p in group["params"]]
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
        self.step(gradients_for(self.groups, number))

    def step(self, gradients: Gradients) -> None:
        for group, found in zip(self.groups, gradients, strict=True):
            for leaf, gradient in zip(group["params"], found, strict=True):
                leaf.grad = gradient
        plain_step(self.worker)

    def counts(self) -> dict[Place, int]:
        """All whole numbers that it keeps."""
        return {
            (at, position, key): count
            for at, group in enumerate(self.groups)
            for position, kept in [(None, group), *enumerate(map(self.state_of, group["params"]))]
            for key, value in kept.items()
            if (count := whole_number(value)) is not None
        }

    def set_count(self, place: Place, count: int) -> None:
        at, position, key = place
        group = self.groups[at]
        kept = group if position is None else self.state_of(group["params"][position])
        kept[key] = with_count(kept[key], count)

    def state_of(self, leaf: torch.Tensor) -> dict[str, Any]:
        kept: dict[str, Any] = self.worker.state.get(leaf, {})
        return kept


class Alone:
    """Each parameter in a step of its own, as ``TorchRule`` has it."""

    def __init__(self, groups: Groups, trial: Step, step: Step) -> None:
        self._trial = trial
        self._step = step
        self._groups = groups
        self._states: dict[int, dict[str, Any]] = defaultdict(dict)
        self.changed: set[str] = set()

    @property
    def groups(self) -> Groups:
        return self._groups

    def take(self, number: int) -> None:
        self.step(gradients_for(self._groups, number))

    def step(self, gradients: Gradients) -> None:
        for group, found in zip(self._groups, gradients, strict=True):
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
            kept[key] = with_count(kept[key], count)

    def is_like(self, other: Together) -> bool:
        for ours, theirs in zip(self._groups, other.groups, strict=True):
            if not ours["params"]:
                continue  # whatever it keeps is for nothing
            if not all(map(same, ours["params"], theirs["params"])):
                return False
            if not same(options_in(ours), options_in(theirs)):
                return False
        return True


def small_groups(
    optimizer: torch.optim.Optimizer, *, shapes: Sequence[int] = (0, 1), varies: bool = False
) -> Groups:
    """With throw-away parameters of these shapes in the places of the first parameter and the last
    for each number of dimensions in a group.
    """
    memo: dict[int, Any] = {}
    groups = [_small_group(group, memo, shapes) for group in optimizer.param_groups]
    if varies:
        vary(groups)
    return groups


def _small_group(
    group: Mapping[str, Any], memo: dict[int, Any], shapes: Sequence[int]
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    parameters = group["params"]
    by_dimensions: dict[int, list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        by_dimensions[max(1, parameter.dim())].append(position)
    chosen = [
        (at, shape_like(d, which))
        for d in sorted(by_dimensions)
        for at, which in zip(_ends(by_dimensions[d]), shapes, strict=False)
    ]
    leaves = [
        like(parameters[at], _randn(shape, rng), kind_in_updates(type(parameters[at])))
        for at, shape in chosen
    ]
    small = moving_options(group, memo) | {"params": leaves}
    if small.get("param_names") is not None:
        small["param_names"] = [small["param_names"][at] for at, _ in chosen]
    return small


def _ends(positions: Sequence[int]) -> Iterable[int]:
    return dict.fromkeys((positions[0], positions[-1]))


def whole_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """With a throw-away parameter of its class in the place of each; those of as many dimensions
    have the same values, in the same memory.
    """
    memo: dict[int, Any] = {}
    values = _SameValues(0)
    return [
        moving_options(group, memo)
        | {"params": [like(p, values[max(1, p.dim())], type(p)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]


def same_gradients(groups: Groups, number: int) -> Gradients:
    """Those of a step of that number, the same for all parameters of as many dimensions."""
    values = _SameValues(number)
    return [[values[leaf.dim()].clone() for leaf in group["params"]] for group in groups]


class _SameValues(dict[int, torch.Tensor]):
    """By the number of dimensions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, dimensions: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(self._number)
        self[dimensions] = _randn(shape_like(dimensions), rng)
        return self[dimensions]


def moving_options(group: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """``options_in``, with a rate at which weights move where it is zero (as schedulers begin)."""
    options = options_in(group, memo)
    rate = options.get("lr")
    if isinstance(rate, int | float) and not rate:
        options["lr"] = _RATE
    elif isinstance(rate, torch.Tensor) and rate.is_floating_point() and not rate.any():
        rate.fill_(_RATE)
    return options


_RATE = 0.01


def vary(groups: Groups, made: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Give the options of groups other values, as schedulers do: numbers with a point, and rates;
    with ``made`` those alone that are as there.
    """
    memo: dict[int, Any] = {}
    for at, group in enumerate(groups):
        factor = _FACTORS[at % len(_FACTORS)]
        for key, value in group.items():
            if key == "params" or (made is not None and not same(value, made[at].get(key))):
                continue
            is_whole_rate = key == "lr" and type(value) is int
            group[key] = varied(float(value) if is_whole_rate else value, factor, memo)


def gradients_for(groups: Groups, number: int, *, for_all: bool = False) -> Gradients:
    """Those for the step of that number, in which not all have one unless ``for_all``."""
    rng = torch.Generator().manual_seed(number)
    found: Gradients = []
    for group in groups:
        scale = SCALES[number % len(SCALES)]
        gradients = [scale * _randn(leaf.shape, rng) for leaf in group["params"]]
        if gradients and not any(map(len, found)) and number in NOT_FINITE:
            gradients[0].view(-1)[0] = NOT_FINITE[number]
        found.append([*gradients])
        without = None if for_all else _WITHOUT.get(number)
        if without is not None:  # a group may be empty
            found[-1][without : without + 1] = [None] * len(gradients[:1])
    return found


def _randn(shape: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
