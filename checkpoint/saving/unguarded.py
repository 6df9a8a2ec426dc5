"""What a guard does not hold back is copied when a guarded save is called.

The guard's step changes the parameters and the state of its optimizer. A forward pass changes other
things before that: the running averages of a normalisation, counters. They are small as a rule, and
those that are small are copied; a large one that changes fails the save
(`checkpoint.tensors.changes`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpoint.format.tree import Leaf, decode_tree, encode_tree
from checkpoint.plan.state_plan import TensorPlan, source_of_leaf
from checkpoint.tensors.copiers import NO_DEVICES, Copier
from checkpoint.tensors.sources import PartialSource, Source, TensorReader, is_data_leaf
from checkpoint.transfer.filling import MIN_DIRECT_BYTES

_TORCH: Any = vars(torch.Tensor)["__torch_function__"].__func__
_NOBODY: Any = torch.nn.Parameter.__torch_function__
_DISPATCH: Any = torch.Tensor.__torch_dispatch__


def copied(
    tensors: Sequence[TensorPlan], guard: object, copier: Copier = NO_DEVICES
) -> tuple[TensorPlan, ...]:
    """The same tensors, where small ones that the guard's step does not change are copies, which
    `copier` brings of those on devices.
    """
    groups = getattr(guard, "param_groups", None)
    if groups is None:  # it does not say what it changes
        return tuple(tensors)
    held: set[tuple[str, int]] = set()
    for tensor in _stepped(groups, getattr(guard, "state", {})):
        with suppress(RuntimeError):  # others' threads may have moved it elsewhere just now
            held.add(_storage(tensor))
    return tuple(
        tensor._replace(source=_copy(tensor.source, copier))
        if _is_loose(tensor.source, held)
        else tensor
        for tensor in tensors
    )


def _stepped(groups: Any, state: Any) -> Iterator[torch.Tensor]:
    for group in groups:
        for value in group["params"]:
            yield from _in_memory(value)
    for values in state.values():
        if isinstance(values, dict):
            for value in values.values():
                yield from _in_memory(value)


def _in_memory(value: object) -> Iterator[torch.Tensor]:
    """The tensors behind a value that may be asked where they lie: itself, or those that it is made
    of (a DTensor of its local one, a quantized state of numbers and scales).

    Those that answer by a method of their class may have to get their values first, from a disk or
    under locks, and are taken to be elsewhere, as are sparse ones: at worst something small is
    copied.
    """
    if not isinstance(value, torch.Tensor):
        return
    made: Any = value
    if is_traceable_wrapper_subclass(made):
        for name in made.__tensor_flatten__()[0]:
            yield from _in_memory(getattr(made, name))
    elif _is_torchs_own(type(value)) and value.layout is torch.strided:
        yield value


def _is_torchs_own(kind: type[torch.Tensor]) -> bool:
    """Whether torch answers for tensors of a type, not a method of the type."""
    answers = kind.__torch_function__
    return kind.__torch_dispatch__ is _DISPATCH and (
        answers is _NOBODY or getattr(answers, "__func__", None) is _TORCH
    )


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


def _copy(source: Source, copier: Copier) -> Source:
    memory = np.empty(source.nbytes, np.uint8)
    if not source.nbytes:
        pass  # of a buffer of nothing torch makes no tensor
    elif isinstance(source.read, TensorReader) and copier.takes(source.read.tensor):
        for target, values in source.read.boxes(0, memory.data):
            copier.copy_now(target, values)
    elif source.read is not None:
        source.read(0, memory.data)
    elif isinstance(source.owner, torch.Tensor):
        torch.from_numpy(memory).copy_(_bytes_of(source.owner))
    else:
        memory[...] = np.asarray(source.owner).reshape(-1).view(np.uint8)
    return Source(source.element, source.shape, memory.ctypes.data, None, memory, source.ranges)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, byte by byte; with one element it may have any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copied_tree(state: object) -> Any:
    """A state tree of its own that saves as this one does now: tensors that share memory share it
    in the copy, byte sources are read. Values are not part of any graph.

    Raises what a save of it raises for what it does not hold, naming the path.
    """
    encoded = encode_tree(state, is_data_leaf)
    shared: dict[int, Any] = {}
    copies = []
    for number, leaf in enumerate(encoded.leaves):
        copies.append(_copy_of(leaf, shared))
        leaf.node["tensor"] = number
    return decode_tree(encoded.node, lambda _, node: copies[node["tensor"]])


def _copy_of(leaf: Leaf, shared: dict[int, Any]) -> Any:
    """`shared`: the memory that was copied, see `copy.deepcopy`."""
    source = source_of_leaf(leaf)
    value = leaf.value
    if isinstance(value, torch.Tensor):
        return _tensor(value, shared)
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    # The save refuses one that has a part alone.
    return value if isinstance(value, PartialSource) else _read(source)


def _tensor(value: torch.Tensor, shared: dict[int, Any]) -> torch.Tensor:
    values = value.detach()
    if not value._is_zerotensor():  # that has no memory, and nothing changes it
        values = copy.deepcopy(values, shared)
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(values, requires_grad=value.requires_grad)
    return values.requires_grad_(value.requires_grad)


def _read(source: Source) -> torch.Tensor:
    memory = torch.empty(source.nbytes, dtype=torch.uint8)
    if source.nbytes:
        assert source.read is not None, "byte sources are read"
        source.read(0, memory.numpy().data)
    assert source.element.torch is not None, "byte sources have types of torch"
    return memory.view(source.element.torch).reshape(source.shape)
