"""Values of optimizers: copies, and whether two are the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


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
