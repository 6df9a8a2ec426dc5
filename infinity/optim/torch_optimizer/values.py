"""Values of optimizers: copies, whether two are the same, counts, and others of their kind."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

NOT_COPIED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, copy.Error)
"""What copying or comparing raises for what cannot be; not what a signal handler has to say."""


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy as ``copy.deepcopy``, or ``value`` itself where there is none."""
    try:
        return copy.deepcopy(value, memo)
    except NOT_COPIED:  # a lock or a handle: what is no state
        return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, by what is in them; NaN is the same as NaN. Tensors on
    the meta device are the same by shape and dtype.
    """
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
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
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
    except NOT_COPIED:  # things that are equal in part, or not to be compared
        return False


def _same_tensors(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.is_meta or b.is_meta:  # there is no more to know of them
        return a.is_meta == b.is_meta
    if a.layout != torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def whole_number(value: Any) -> int | None:
    """``value`` as the whole number that it is; None if it is none."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and value.dtype in _WHOLE_IN
        return whole_number(value.item()) if is_one else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value == int(value) else None


_WHOLE_IN = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What has place for a large count."""


def with_count(value: Any, count: int) -> Any:
    return value.fill_(count) if isinstance(value, torch.Tensor) else type(value)(count)


def varied(value: Any, factor: float, memo: dict[int, Any]) -> Any:
    """``value`` with all numbers that have a point times ``factor``; with one ``memo``, what is one
    object stays one.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, float):
        return value * factor
    made: Any = value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        made = value.detach() * factor
    elif type(value) in (list, tuple):
        made = type(value)(varied(part, factor, memo) for part in value)
    elif type(value) is dict:
        made = {key: varied(part, factor, memo) for key, part in value.items()}
    memo[id(value)] = made
    return made
