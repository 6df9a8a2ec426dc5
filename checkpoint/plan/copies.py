"""Copies of what is to be saved later than its moment, taken by the walk that saves go."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from checkpoint.format.tree import Leaf, decode_tree, encode_tree
from checkpoint.plan.state_plan import source_of_leaf
from checkpoint.tensors.sources import PartialSource, Source, is_data_leaf


def copied_tree(state: object) -> Any:
    """A state tree of its own that saves as this one does now: tensors that share memory share it
    in the copy, byte sources are read. Values are not part of any graph.

    Raises what a save of it raises for what it does not hold, naming the path.
    """
    encoded = encode_tree(state, is_data_leaf)
    shared: dict[int, Any] = {}
    copies = []
    for number, leaf in enumerate(encoded.leaves):
        copies.append(_copy(leaf, shared))
        leaf.node["tensor"] = number
    return decode_tree(encoded.node, lambda _, node: copies[node["tensor"]])


def _copy(leaf: Leaf, shared: dict[int, Any]) -> Any:
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
