"""Optimizer state in a checkpoint: in which dtypes it was saved, and whether and how it can be
loaded into the planes that a rule keeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from checkpoint.format.checksum import crc32c
from infinity.optim.rule import OptimizerRule, SavedState
from infinity.values.leaves import Leaf
from infinity.values.plane_bytes import MASTER_PLANES, PlaneBytes, planes_of_leaf
from swap.storage.planes import as_bytes
from swap.tiered import TieredState


def state_of(
    state: TieredState, leaf: Leaf, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> SavedState:
    """What a checkpoint with the state of an optimizer has of that of ``leaf``."""
    name, here = leaf.name, _state_planes(state, leaf)
    return SavedState(
        path=path,
        name=name,
        kept_by=saved["optimizer_class"],
        steps=int(saved["steps"][name]),
        planes=[plane for plane in saved["planes"][name] if plane not in MASTER_PLANES],
        dtypes=saved.get("plane_dtypes", {}).get(name, {}),
        state_dtype=saved.get("state_dtype", torch.float32),
        is_converted=saved["dtypes"][name] != leaf.first.spec.dtype,
        is_tiled_alike=saved.get("parts", {}).get(name) == [part.numel for part in leaf.parts],
        is_trained=leaf.first.spec.trainable,
        here={plane.plane.name: plane.dtype for plane in here},
        has_blocks=any(plane.plane.per > 1 for plane in here),
    )


def plane_dtypes(
    state: TieredState, rule: OptimizerRule, leaves: Iterable[Leaf]
) -> dict[str, dict[str, torch.dtype]]:
    """Of the state of every leaf, where checkpoints name them."""
    if not rule.names_dtypes:
        return {}
    return {
        leaf.name: {plane.plane.name: plane.dtype for plane in _state_planes(state, leaf)}
        for leaf in leaves
    }


def must_cast(rule: OptimizerRule, saved: Mapping[str, Any], leaf: Leaf, plane: PlaneBytes) -> bool:
    """Whether what was saved for a state plane has another dtype. Before checkpoints named them,
    all state was in float32, or in float64 beside weights of that.
    """
    name = plane.plane.name
    if name in MASTER_PLANES or not rule.names_dtypes:
        return False
    return _saved_dtype(saved, leaf, name) != plane.dtype


def cast(read: Callable[..., Any], leaf: Leaf, plane: PlaneBytes, pattern: str) -> None:
    """Load one plane of state that was saved in another dtype, read whole."""
    tree = read(only=[pattern])
    values = tree["optimizer"][plane.plane.name][leaf.name].reshape(-1).to(plane.dtype)
    plane.write(0, as_bytes(values).data)


def _saved_dtype(saved: Mapping[str, Any], leaf: Leaf, name: str) -> torch.dtype:
    found = saved.get("plane_dtypes", {}).get(leaf.name, {}).get(name)
    if found is not None:
        return found  # type: ignore[no-any-return]
    return torch.float64 if saved["dtypes"][leaf.name] == torch.float64 else torch.float32


def _state_planes(state: TieredState, leaf: Leaf) -> list[PlaneBytes]:
    planes = planes_of_leaf(state, leaf, None)
    return [plane for plane in planes if plane.plane.name not in MASTER_PLANES]


_SAMPLE = 256
"""Values of a frozen parameter that tell one base from another."""


def base_of(state: TieredState, leaves: Iterable[Leaf]) -> dict[str, int]:
    """A checksum of the first values of each leaf that begins on this rank."""
    return {leaf.name: _checksum(state, leaf) for leaf in leaves if _begins_here(leaf)}


def check_base(
    state: TieredState, leaves: Iterable[Leaf], saved: Mapping[str, Any], path: Any
) -> None:
    """Raises ``ValueError`` for a checkpoint without frozen weights that belongs to other ones."""
    base = saved.get("base", {})
    for leaf in leaves:
        is_same_kind = saved["dtypes"].get(leaf.name) == leaf.first.spec.dtype
        if not is_same_kind or leaf.name not in base or not _begins_here(leaf):
            continue
        if _checksum(state, leaf) != base[leaf.name]:
            raise ValueError(
                f"{path} has only what was trained, over a model with other values of {leaf.name}; "
                "offload the model (or weights=) that it was trained over"
            )


def _begins_here(leaf: Leaf) -> bool:
    return leaf.first.first == 0 and leaf.first.spec.numel > 0


def _checksum(state: TieredState, leaf: Leaf) -> int:
    first = leaf.first
    numel = min(_SAMPLE, math.prod(leaf.shape), first.spec.numel)
    values = torch.empty(numel, dtype=first.spec.dtype, device="cpu")
    state.planes.read(first.index, "weight", 0, values)
    return crc32c(as_bytes(values).data)
