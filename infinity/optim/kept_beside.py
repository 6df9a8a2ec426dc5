"""What an optimizer keeps beside its groups and the state of each parameter: in attributes, its own
or those of parameters, and in state that is no parameter's. Each offloaded parameter is updated by
a copy of the optimizer as it was made, which has that alone.

An attribute that steps change is right where no step needs what one before it left there (a norm
that each step computes anew), or where it is the same after every step (a flag, a table of
constants). One that has parameters in it, or their ids, is right where no step needs it. Whether
steps need it is found by steps without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch


class Trial(Protocol):
    """An optimizer with throw-away parameters in the places of all that it has."""

    worker: torch.optim.Optimizer

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Those."""

    def take(self, number: int) -> None:
        """A step with gradients of that number."""


_STEPS, _OTHER_STEPS = range(3), range(7, 10)
"""Numbers of steps with gradients that are finite."""
_NOT_KEPT = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_kept(optimizer: torch.optim.Optimizer, make: Callable[[], Trial]) -> None:
    """Raise ``ValueError`` naming what steps of ``optimizer`` need of those before them, or of its
    parameters, that updates of one parameter at a time do not have. ``make`` gives trials.
    """
    name = type(optimizer).__name__
    trial = make()
    own, of_leaves = _steps_of(trial, _STEPS)
    for owner, kept in trial.worker.state.items():
        if not any(owner is leaf for leaf in trial.leaves) and kept:
            _refuse(name, f"it keeps state by {owner!r}, which is no parameter of its own")
    again, of_leaves_again = _steps_of(make(), _OTHER_STEPS)
    for key in _unsettled(own, again):
        if _is_needed(make, _worker_of, key, after=1):
            _refuse(name, f"it keeps something from step to step in its attribute {key!r}")
    for key in _unsettled(of_leaves, of_leaves_again):
        if _is_needed(make, _leaves_of, key, after=1):
            _refuse(name, f"it keeps something in the attribute {key!r} of parameters")
    real = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in vars(optimizer).items():
        is_kept = key not in _NOT_KEPT and _has_any(value, real, set())
        if is_kept and _is_needed(make, _worker_of, key, after=0):
            _refuse(name, f"it has parameters, or their id(), in its attribute {key!r}")


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
    as_they_are = [*trial.leaves, trial.worker]
    memo: dict[int, Any] = {id(one): one for one in as_they_are}
    memo |= of_modules(vars(trial.worker), memo)
    own = {k: copied(v, memo) for k, v in vars(trial.worker).items() if k not in _NOT_KEPT}
    of_leaves: dict[str, Any] = {}
    for position, leaf in enumerate(trial.leaves):
        for key, value in vars(leaf).items():
            of_leaves.setdefault(key, {})[position] = copied(value, memo)
    return own, of_leaves


def _unsettled(one: Sequence[Snapshot], other: Sequence[Snapshot]) -> list[str]:
    """The attributes that steps change, but for those that are the same after all of them."""
    keys = dict.fromkeys(key for snapshot in one for key in snapshot)
    after = [*one[1:], *other[1:]]

    def is_kept(key: str, snapshots: Sequence[Snapshot]) -> bool:
        first = snapshots[0]
        return all(
            (key in first) == (key in later) and same(first.get(key), later.get(key))
            for later in snapshots[1:]
        )

    return [key for key in keys if not (is_kept(key, one) or is_kept(key, after))]


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
    absent = _Absent()
    for holder in holders(without):
        holder[key] = absent
    try:
        without.take(after)
    except Exception:  # whatever it makes of what has no value
        return True
    is_same = all(map(same, whole.leaves, without.leaves))
    return _Absent.__dict__["was_used"].__get__(absent) or not is_same


class _Absent:
    """Has no value, and knows whether one was asked for."""

    __slots__ = ("was_used",)

    def __init__(self) -> None:
        object.__setattr__(self, "was_used", False)

    def __getattribute__(self, name: str) -> Any:
        object.__setattr__(self, "was_used", True)
        raise TypeError("an attribute of the optimizer that a step before this one left")


def _use(self: _Absent, *_: Any) -> Any:
    object.__setattr__(self, "was_used", True)
    raise TypeError("an attribute of the optimizer that a step before this one left")


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (
    *(f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in _BINARY),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__", "__bool__"),
    *("__int__", "__float__", "__index__", "__neg__", "__abs__", "__call__", "__str__", "__repr__"),
    *("__len__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__delitem__"),
    *("__enter__", "__exit__", "__setattr__", "__format__"),
):
    setattr(_Absent, _name, _use)


def _has_any(value: Any, ids: set[int], seen: set[int]) -> bool:
    """Whether there is a parameter in ``value``, of those with these ``ids``, or one of the ids."""
    if isinstance(value, int):
        return value in ids
    if id(value) in seen:
        return False
    seen.add(id(value))
    return id(value) in ids or any(_has_any(part, ids, seen) for part in _parts_of(value))


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif not isinstance(value, torch.Tensor | torch.nn.Module | type):
        yield from getattr(value, "__dict__", {}).values()


def of_modules(attributes: Mapping[str, Any], known: Mapping[int, Any]) -> dict[int, Any]:
    """The tensors of the modules among ``attributes``, by their ids, but for those ``known``: a
    memo with which copies of the modules have these very tensors. They may be as large as a model.
    """
    modules = [value for value in attributes.values() if isinstance(value, torch.nn.Module)]
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return {id(tensor): tensor for tensor in tensors if id(tensor) not in known}


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy as ``copy.deepcopy``, or ``value`` itself where there is none."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock or a handle: what is no state
        return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, by what is in them; NaN is the same as NaN."""
    return _same(one, other, set())


def _same(a: Any, b: Any, seen: set[tuple[int, int]]) -> bool:
    if a is b or (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    of_objects: Any = object.__eq__
    if type(a) is type(b) and type(a).__eq__ is of_objects:
        return _same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), seen)
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # things that are equal in part, or not to be compared
        return False


def _same_tensors(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    return bool(((a == b) | ((a != a) & (b != b))).all())
