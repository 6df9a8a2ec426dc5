"""What a guard does not hold back is copied when a guarded save is called.

The guard's step changes the parameters and the state of its optimizer. A forward pass changes other
things before that: the running averages of a normalisation, counters. They are small as a rule, and
those that are small are copied; a large one that changes fails the save
(`checkpoint.tensors.changes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from checkpoint.plan.state_plan import TensorPlan
from checkpoint.tensors.sources import Source
from checkpoint.transfer.filling import MIN_DIRECT_BYTES

_TORCH: Any = vars(torch.Tensor)["__torch_function__"].__func__
_NOBODY: Any = torch.nn.Parameter.__torch_function__


def copied(tensors: Sequence[TensorPlan], guard: object) -> tuple[TensorPlan, ...]:
    """The same tensors, where small ones that the guard's step does not change are copies."""
    groups = getattr(guard, "param_groups", None)
    if groups is None:  # it does not say what it changes
        return tuple(tensors)
    held = {_storage(tensor) for tensor in _stepped(groups, getattr(guard, "state", {}))}
    return tuple(
        tensor._replace(source=_copy(tensor.source)) if _is_loose(tensor.source, held) else tensor
        for tensor in tensors
    )


def _stepped(groups: Any, state: Any) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from filter(_is_in_memory, group["params"])
    for values in state.values():
        if isinstance(values, dict):
            yield from filter(_is_in_memory, values.values())


def _is_in_memory(value: object) -> bool:
    """Whether it is a tensor that may be asked where it lies. Those that answer by a
    ``__torch_function__`` of their class may have to get their values first, from a disk or under
    locks, and are taken to be elsewhere: at worst something small is copied.
    """
    if not isinstance(value, torch.Tensor):
        return False
    answers = type(value).__torch_function__
    return answers is _NOBODY or getattr(answers, "__func__", None) is _TORCH


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    if tensor._is_zerotensor():  # no memory, and nothing changes it
        return str(tensor.device), 0
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _is_loose(source: Source, held: set[tuple[str, int]]) -> bool:
    if source.nbytes >= MIN_DIRECT_BYTES:
        return False
    owner = source.owner
    return isinstance(owner, np.ndarray) or (
        isinstance(owner, torch.Tensor) and _storage(owner) not in held
    )


def _copy(source: Source) -> Source:
    memory = np.empty(source.nbytes, np.uint8)
    if source.read is not None:
        source.read(0, memory.data)
    elif isinstance(source.owner, torch.Tensor):
        torch.from_numpy(memory).copy_(_bytes_of(source.owner))
    else:
        memory[...] = np.asarray(source.owner).reshape(-1).view(np.uint8)
    return Source(source.element, source.shape, memory.ctypes.data, None, memory, source.ranges)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, byte by byte."""
    return tensor.detach().reshape(-1).view(torch.uint8)
