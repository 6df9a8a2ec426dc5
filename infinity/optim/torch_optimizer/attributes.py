"""The attributes of an optimizer as it was made, which is what updates of single parameters have.

Values are plain: numbers, text, tensors, arrays, and containers, functions and objects of these. A
value that leads to parameters (one of them, its ``id()``, its address, a module) or of which a copy
would not have all (a lock, an iterator, an object with ``__slots__``) is kept from updates: what
asks for it is told so.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from infinity.optim.torch_optimizer.values import copied, same
from infinity.optim.torch_optimizer.workers import is_of_torch

NOT_KEPT = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What is not an attribute of the optimizer's own. Hooks are for whole steps."""


_PARAMETERS = "parameters, or what leads to them (their id(), a module),"
_OPAQUE = "something of which a copy may lack a part (an iterator, a lock, what has __slots__)"


class Attributes:
    """Of ``optimizer``; who asks for what updates do not have finds an ``Absent`` there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        known = _known(optimizer)
        self._optimizer = optimizer
        self._options = _tensors_of_groups(optimizer)  # also those that a load replaces later
        self.absent: dict[str, str] = {}
        """What updates do not have, and what it is."""
        self._made: dict[str, Any] = {}
        self._bound: set[str] = set()
        for key, value in _own(optimizer):
            walk = _Walk(known, optimizer)
            if found := walk.beside_plain(value):
                self.absent[key] = found
                continue
            if walk.meets_itself:
                self._bound.add(key)
            self._made[key] = copied(value, {id(optimizer): optimizer})
        self._anew: set[str] = set()
        self._shared = self.copies(optimizer)
        """What updates find there, as none of them changes it."""
        self._unneeded: set[str] = set()

    def copies(self, worker: object, memo: dict[int, Any] | None = None) -> dict[str, Any]:
        """As it was made, for ``worker`` alone."""
        memo = {} if memo is None else memo
        memo[id(self._optimizer)] = worker
        made = {key: copied(value, memo) for key, value in self._made.items()}
        return made | {key: Absent() for key in self.absent}

    def give(self, worker: torch.optim.Optimizer) -> None:
        """Let ``worker`` have them for one update: those that steps change, as they were made."""
        vars(worker).update(self._shared)
        memo: dict[int, Any] = {id(self._optimizer): worker}
        for key in sorted(self._bound | self._anew):
            vars(worker)[key] = copied(self._made[key], memo)

    def are_changed_by_steps(self, keys: Iterable[str]) -> None:
        """Of these each update has a copy of its own from now on."""
        self._anew.update(key for key in keys if key in self._made)

    def forget_trials(self) -> None:
        """Let updates find nothing that a trial left."""
        self._shared = self.copies(self._optimizer)

    def changed(self, is_needed: Callable[[str], bool]) -> list[str]:
        """Those that are not as they were made, but for what no step needs. Tensors that are
        options of a group, too, or were as the block began, are the group's to change, as
        schedules fill them.
        """
        found = []
        options = {id(one) for one in (*self._options, *_tensors_of_groups(self._optimizer))}
        for key, value in _own(self._optimizer):
            if key in self._unneeded or key in self.absent:
                continue
            if key in self._made and same(*_beside(options, value, self._made[key])):
                continue
            if is_needed(key):
                found.append(key)
            else:
                self._unneeded.add(key)
        return found


def _beside(options: Collection[int], value: Any, made: Any) -> tuple[Any, Any]:
    """Both, without the tensors of a dictionary whose ``id`` is in ``options``: ``defaults`` has
    those of groups.
    """
    if not isinstance(value, dict) or not isinstance(made, dict):
        return value, made
    tensors = {key for key, one in value.items() if isinstance(one, torch.Tensor)}
    shared = {key for key in tensors if id(value[key]) in options}
    return _without(value, shared), _without(made, shared)


def _tensors_of_groups(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    options = (value for group in optimizer.param_groups for value in group.values())
    return [option for option in options if isinstance(option, torch.Tensor)]


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The others."""
    return {key: value for key, value in values.items() if key not in keys}


def _own(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(optimizer).items() if key not in NOT_KEPT]


def ways_to_parameters(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Names the values in groups, and in the classes of ``optimizer``, that lead to parameters."""
    known = _known(optimizer)
    for place, key, value in (*_in_groups(optimizer), *_in_classes(type(optimizer))):
        if _Walk(known, optimizer).beside_plain(value) == _PARAMETERS:
            yield f"{key!r} of {place}"


def _in_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    for group in optimizer.param_groups:
        yield from (("a group", key, value) for key, value in group.items() if key != "params")


def _in_classes(kind: type) -> Iterator[tuple[str, str, Any]]:
    for base in kind.__mro__:
        if base is not object and not is_of_torch(base):
            yield from ((f"the class {base.__name__}", *item) for item in values_in(base).items())


def values_in(kind: type) -> dict[str, Any]:
    """The attributes of a class that are data: no functions, no descriptors."""
    return {
        key: value
        for key, value in vars(kind).items()
        if not (key.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


def _known(optimizer: torch.optim.Optimizer) -> set[int]:
    """Numbers that a parameter is known by."""
    known: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known.add(id(parameter))
            if address := _address(parameter):
                known.add(address)
    return known


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # of tensors without a storage
        return 0


class _Walk:
    """Through all that a value has in it. ``known``: numbers of parameters."""

    def __init__(self, known: set[int], itself: object) -> None:
        self.meets_itself = False
        self._known = known
        self._itself = itself
        self._seen: set[int] = set()

    def beside_plain(self, value: Any) -> str | None:
        """What is in it that is not plain, parameters first; None if all is."""
        found = None
        left = [value]
        while left:
            one = left.pop()
            if isinstance(one, int) and one in self._known:
                return _PARAMETERS
            if one is self._itself:
                self.meets_itself = True
                continue
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            if id(one) in self._known or isinstance(one, torch.nn.Module):
                return _PARAMETERS
            parts = _parts_of(one)
            found = _OPAQUE if parts is None else found
            left += parts or ()
        return found


_WHOLE = (
    *(type(None), int, float, complex, str, bytes, range, slice, type, enum.Enum, np.generic),
    *(types.ModuleType, types.BuiltinFunctionType, logging.Logger),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)
"""Of which a copy has all, or which are the same everywhere."""


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What is in a value; None where a copy may not have all of it."""
    if isinstance(value, _WHOLE):
        return ()
    if isinstance(value, torch.Tensor):
        return (_address(value),)
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.kind in "iuO" else ()
    if isinstance(value, Mapping):
        return [*value, *value.values(), getattr(value, "default_factory", None)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    has_slots = any(vars(kind).get("__slots__") for kind in type(value).__mro__)
    return None if has_slots or not hasattr(value, "__dict__") else vars(value).values()


def _of_function(function: types.FunctionType) -> list[Any]:
    found: list[Any] = [function.__defaults__, function.__kwdefaults__, vars(function)]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            found.append(None)
    return found


class Absent:
    """Has no value, and knows whether one was asked for."""

    __slots__ = ("was_used",)

    def __init__(self) -> None:
        object.__setattr__(self, "was_used", False)

    def __getattribute__(self, name: str) -> Any:
        _use(self)


def was_used(absent: Absent) -> bool:
    """Whether anything was asked of it."""
    return bool(Absent.__dict__["was_used"].__get__(absent))


def _use(self: Absent, *_: Any) -> Any:
    object.__setattr__(self, "was_used", True)
    raise TypeError("an attribute that updates of single parameters do not have")


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (
    *(f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in _BINARY),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__", "__bool__"),
    *("__int__", "__float__", "__index__", "__neg__", "__abs__", "__call__", "__str__", "__repr__"),
    *("__len__", "__iter__", "__next__", "__contains__", "__getitem__", "__setitem__"),
    *("__delitem__", "__enter__", "__exit__", "__setattr__", "__format__"),
):
    setattr(Absent, _name, _use)
