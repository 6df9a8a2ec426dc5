"""What an optimizer keeps beside its groups and the state of each parameter: in attributes, its own
or those of parameters, and in state that is no parameter's. Each offloaded parameter is updated by
a copy of the optimizer as it was made, which has that alone.

An attribute that steps change is right where no step needs what one before it left there (a norm
that each step computes anew), or where it is the same after every step, whatever the gradients, the
options and the shapes (a flag, a table of constants). Whether steps need it is found by steps
without it. One that is not plain, see ``attributes``, is right where no step asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from infinity.optim.torch_optimizer.attributes import NOT_KEPT, Absent, was_used
from infinity.optim.torch_optimizer.values import copied, same


class Trial(Protocol):
    """An optimizer with throw-away parameters in the places of all that it has."""

    worker: torch.optim.Optimizer
    absent: dict[str, str]
    """The attributes that updates do not have, and what they are."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Those."""

    def take(self, number: int) -> None:
        """A step with gradients of that number."""


_STEPS, _OTHER_STEPS = range(3), range(7, 10)
"""Numbers of steps with gradients that are finite."""


Make = Callable[[], Trial]


def check_kept(
    optimizer: torch.optim.Optimizer, make: Make, varied: Make, varied_options: Make
) -> set[str]:
    """Raise ``ValueError`` naming what steps of ``optimizer`` need of those before them, or of its
    parameters, that updates of one parameter at a time do not have; gives the attributes that its
    steps change.

    All three give trials: ``varied`` with other options and parameters of other shapes,
    ``varied_options`` with the same parameters.
    """
    name = type(optimizer).__name__
    trial = make()
    try:
        own, of_leaves = _steps_of(trial, _STEPS)
    finally:  # what a step makes of what has no value says less
        _check_absent(name, trial)
    for owner, kept in trial.worker.state.items():
        if not any(owner is leaf for leaf in trial.leaves) and kept:
            _refuse(name, f"it keeps state by {owner!r}, which is no parameter of its own")
    again, _ = _steps_of(varied(), _OTHER_STEPS)
    for key in _unsettled(own, again):
        if _is_needed(make, _worker_of, key, after=1):
            _refuse(name, _what_is_kept(key, own))
    if any(of_leaves):
        _, of_leaves_again = _steps_of(varied_options(), _OTHER_STEPS)
        for key in _unsettled(of_leaves, of_leaves_again):
            if _is_needed(make, _leaves_of, key, after=1):
                _refuse(name, f"it keeps something in the attribute {key!r} of parameters")
    return {key for key in _keys(own) if not _is_kept(key, own)} | {
        key for key in _keys(again) if not _is_kept(key, again)
    }


def _what_is_kept(key: str, own: Sequence[Snapshot]) -> str:
    if _is_kept(key, own[1:]):
        return (
            f"its first step sets the attribute {key!r} by what it finds (options, shapes, "
            "values), which is another thing for each parameter and later step: compute it in "
            "__init__, or anew in each step"
        )
    return f"it keeps something from step to step in its attribute {key!r}"


def _check_absent(name: str, trial: Trial) -> None:
    for key, what in trial.absent.items():
        value = vars(trial.worker).get(key)
        if isinstance(value, Absent) and was_used(value):
            _refuse(name, f"its steps use the attribute {key!r}, which has {what} in it")


def is_needed(make: Callable[[], Trial], key: str) -> bool:
    """Whether a first step is another one without the attribute ``key`` of the optimizer."""
    return _is_needed(make, _worker_of, key, after=0)


def _worker_of(trial: Trial) -> list[dict[str, Any]]:
    return [vars(trial.worker)]


def _leaves_of(trial: Trial) -> list[dict[str, Any]]:
    return [*map(vars, trial.leaves)]


REMEDY = (
    "so use infinity.AdamW(...), an optimizer of torch.optim, or this one without what couples "
    "parameters; offload(max_grad_norm=) clips by the norm over all"
)


def _refuse(name: str, what: str) -> NoReturn:
    raise ValueError(
        f"{name} does not update every parameter by itself: {what}; an offloaded model is updated "
        "one parameter at a time, by the state of that, its attributes as they came and the "
        f"options of its group, which steps may count in: let it keep it there, or {REMEDY[3:]}"
    )


Snapshot = Mapping[str, Any]


def _steps_of(trial: Trial, numbers: Iterable[int]) -> tuple[list[Snapshot], list[Snapshot]]:
    """The attributes of the optimizer and, together, those of parameters: as they were made, and
    after each step.
    """
    found = [_snapshot(trial)]
    for number in numbers:
        trial.take(number)
        found.append(_snapshot(trial))
    return [own for own, _ in found], [of_leaves for _, of_leaves in found]


def _snapshot(trial: Trial) -> tuple[Snapshot, Snapshot]:
    as_they_are = [*trial.leaves, trial.worker, *map(vars(trial.worker).get, trial.absent)]
    memo: dict[int, Any] = {id(one): one for one in as_they_are}
    own = {k: copied(v, memo) for k, v in vars(trial.worker).items() if k not in NOT_KEPT}
    of_leaves: dict[str, Any] = {}
    for position, leaf in enumerate(trial.leaves):
        for key, value in vars(leaf).items():
            of_leaves.setdefault(key, {})[position] = copied(value, memo)
    return own, of_leaves


def _unsettled(one: Sequence[Snapshot], other: Sequence[Snapshot]) -> list[str]:
    """The attributes that steps change, but for those that are the same after all of them."""
    after = [*one[1:], *other[1:]]
    return [
        key
        for key in _keys([*one, *other])
        if not (_is_kept(key, one) and _is_kept(key, other)) and not _is_kept(key, after)
    ]


def _keys(snapshots: Iterable[Snapshot]) -> Iterable[str]:
    return dict.fromkeys(key for snapshot in snapshots for key in snapshot)


def _is_kept(key: str, snapshots: Sequence[Snapshot]) -> bool:
    first = snapshots[0]
    return all(
        (key in first) == (key in later) and same(first.get(key), later.get(key))
        for later in snapshots[1:]
    )


def _is_needed(
    make: Callable[[], Trial],
    holders: Callable[[Trial], list[dict[str, Any]]],
    key: str,
    *,
    after: int,
) -> bool:
    """Whether a step that comes ``after`` so many is another one without the attribute ``key`` of
    ``holders``.
    """
    whole, without = make(), make()
    for number in range(after):
        whole.take(number)
        without.take(number)
    whole.take(after)
    absent = Absent()
    for holder in holders(without):
        holder[key] = absent
    try:
        without.take(after)
    except Exception:  # whatever it makes of what has no value
        return True
    is_same = all(map(same, whole.leaves, without.leaves))
    return was_used(absent) or not is_same
