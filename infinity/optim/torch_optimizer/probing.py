"""Which state an optimizer keeps that has a value for each element of a parameter: steps on
throw-away parameters show it. It is given components, and there is no place for more later, so what
comes only after some steps, or for large parameters alone, is looked for too.

State that an optimizer comes with must be what its class makes anew of a parameter and the options
of its group: that is all that updates of single parameters begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from infinity.optim.torch_optimizer.separable import class_as_it_is, random_states
from infinity.optim.torch_optimizer.state import StateComponents
from infinity.optim.torch_optimizer.trials import COUNT, moving_options
from infinity.optim.torch_optimizer.values import same, varied, whole_number, with_count
from infinity.optim.torch_optimizer.workers import (
    is_of_torch,
    kind_in_updates,
    like,
    options_at,
    options_in,
    shape_like,
    values_of,
)
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS

StepOne = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], Mapping[str, Any]]
"""A step of one parameter, by options, which it changes, and state: the state after it."""

FIRST_STEPS = 3
"""Optimizers make some of their state after the first step."""
_LATER_STEPS, _AHEAD_STEPS = 9, 4
"""Steps that follow in an optimizer of others, and more with its counts set ahead."""
_LARGE_ELEMENTS = 65_536
"""Of parameters that optimizers are known to treat as large ones. Of one that is as large, or not
always in memory, at least as many of its elements are tried.
"""
_MOST_GROUPS = 16
"""So many groups that differ are looked at in later steps, and with large parameters."""


def probe(optimizer: torch.optim.Optimizer, step: StepOne, dtype: torch.dtype) -> StateComponents:
    """The components for parameters with weights of ``dtype``.

    Raises ``ValueError`` naming state that has no place, and what the first steps raise.
    """
    found = StateComponents(type(optimizer).__name__)
    looked_at: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = moving_options(group, {})
        is_other = not is_of_torch(type(optimizer)) and len(looked_at) < _MOST_GROUPS
        kind = varied({key: value for key, value in options.items() if key != "lr"}, 0.0, {})
        is_other = is_other and not any(same(kind, other) for other in looked_at)
        looked_at += [kind] if is_other else []
        for position, parameter in _one_of_each(group["params"]):
            trial = _Probe(found, step, {**options_at(options, position)})
            trial.begin(parameter, shape_like(max(1, parameter.dim())), dtype)
            trial.take(FIRST_STEPS, must=True)
            if is_other:
                trial.go_on()
        for position, parameter in _largest(group["params"]) if is_other else ():
            trial = _Probe(found, step, {**options_at(options, position)})
            trial.begin(parameter, _reduced(parameter.shape), dtype)
            trial.take(FIRST_STEPS, must=False)
    return found


class _Probe:
    """Of one throw-away parameter."""

    def __init__(self, found: StateComponents, step: StepOne, options: dict[str, Any]) -> None:
        self._found = found
        self._step = step
        self._options = options
        self._state: Mapping[str, Any] = {}

    def begin(self, parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        zeros = torch.zeros(shape, dtype=dtype, device="cpu")
        self._leaf = like(parameter, zeros, kind_in_updates(type(parameter)))

    def take(self, steps: int, *, must: bool) -> bool:
        """Whether so many steps can be taken; what they raise is raised if they ``must``."""
        for _ in range(steps):
            self._leaf.grad = torch.ones_like(self._leaf)
            try:
                after = self._step(self._leaf, self._options, dict(self._state))
            except Exception:  # whatever the steps of somebody's optimizer raise
                if must:
                    raise
                return False
            self._state = dict(after)
            self._found.note(self._state, self._leaf.shape)
        return True

    def go_on(self) -> None:
        """Also over a count that most periods end at."""
        if self.take(_LATER_STEPS, must=False):
            before = self._counts()
            if self.take(1, must=False):
                self._set_ahead(before)
                self.take(_AHEAD_STEPS, must=False)

    def _counts(self) -> dict[tuple[int, str], int]:
        return {
            (at, key): count
            for at, kept in enumerate((self._options, self._state))
            for key, value in kept.items()
            if (count := whole_number(value)) is not None
        }

    def _set_ahead(self, before: Mapping[tuple[int, str], int]) -> None:
        for (at, key), count in self._counts().items():
            if before.get((at, key)) == count - 1:
                kept: Any = (self._options, self._state)[at]
                kept[key] = with_count(kept[key], COUNT - 2)


def _one_of_each(parameters: Iterable[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """A parameter, and where it is, for each number of dimensions, class, and what is marked."""
    found: dict[Any, tuple[int, torch.Tensor]] = {}
    for position, parameter in enumerate(parameters):
        marks = frozenset(mark for mark in vars(parameter).items() if isinstance(mark[1], bool))
        key = max(1, parameter.dim()), kind_in_updates(type(parameter)), marks
        found.setdefault(key, (position, parameter))
    return list(found.values())


def _largest(parameters: Iterable[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """The largest parameter for each number of dimensions, and where it is, unless it is always in
    memory.
    """
    found: dict[int, tuple[int, torch.Tensor]] = {}
    for position, parameter in enumerate(parameters):
        known = found.get(parameter.dim())
        if parameter.numel() > ALWAYS_ON_HOST_ELEMENTS and (
            known is None or parameter.numel() > known[1].numel()
        ):
            found[parameter.dim()] = (position, parameter)
    return list(found.values())


def _reduced(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape like it, at most about twice as large as is large. No two sizes are the same: what
    has the shape of a parameter by chance (a matrix of a square one) has no place of its own.
    """
    sizes = [*shape]
    while torch.Size(sizes).numel() >= 2 * _LARGE_ELEMENTS:
        longest = sizes.index(max(sizes))
        sizes[longest] = (sizes[longest] + 1) // 2
    for at in range(1, len(sizes)):
        while sizes[at] in sizes[:at]:
            sizes[at] += 1
    return tuple(sizes)


def check_made_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` comes with state. Raises ``ValueError`` for state that a parameter has
    and its class does not make anew, or the other way round. Of one parameter at a time the memory
    is taken twice.
    """
    if not any(optimizer.state.values()):
        return False
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for owner, kept in optimizer.state.items():
        if kept and id(owner) not in own:
            _refuse(optimizer, f"what it has by {owner!r} is no parameter's")
    with random_states(), class_as_it_is(type(optimizer)):
        for group in optimizer.param_groups:
            options = options_in(group)
            for position, parameter in enumerate(group["params"]):
                _check_state_of(optimizer, parameter, options_at(options, position))
    return True


def _check_state_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, options: Mapping[str, Any]
) -> None:
    found = optimizer.state.get(parameter, {})
    whose = f"that of a parameter of shape {tuple(parameter.shape)}"
    try:
        made = _state_made(optimizer, parameter, options)
        is_same = same(found, made)
    except Exception as error:  # whatever __init__ makes of arguments that it was not called with
        what = f"{whose} cannot be made anew ({type(error).__name__}: {error})"
        _refuse(optimizer, what, error)
    if not is_same:
        names = ", ".join(map(repr, {**made, **found}))
        _refuse(optimizer, f"{whose} ({names}) is not what is made anew")
    if "lr" in options and found and not is_of_torch(type(optimizer)):
        other = {**options, "lr": varied(options["lr"], 0.75, {})}
        if not same(found, _state_made(optimizer, parameter, other)):
            _refuse(optimizer, f"{whose} goes by the rate, which may be another by the first step")


def _state_made(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What the class of ``optimizer`` makes for one like ``parameter``, as updates have it made."""
    make: Any = type(optimizer)
    leaf = like(parameter, values_of(parameter).clone(), kind_in_updates(type(parameter)))
    leaf.requires_grad_(parameter.requires_grad)
    state: dict[str, Any] = make([{**options, "params": [leaf]}], **optimizer.defaults).state.get(
        leaf, {}
    )
    return state


def _refuse(
    optimizer: torch.optim.Optimizer, what: str, cause: Exception | None = None
) -> NoReturn:
    name = type(optimizer).__name__
    raise ValueError(
        f"{name} has state that the factory gave it (load_state_dict) or that __init__ makes from "
        f"more than its options: {what}; updates of single parameters begin with the state that "
        f"{name}(groups, **defaults) makes: let steps make state where a parameter has none "
        "(`if not state: ...`), and what tells parameters apart be an attribute of the parameter "
        "(p.lr_scale = 0.1); an earlier run goes on with offloaded.load(path), and `infinity "
        "import` makes such a checkpoint of the state of torch.optim.AdamW"
    ) from cause
