"""Optimizer state in a checkpoint: in which dtypes it was saved, and whether and how it can be
loaded into the components that a rule keeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from checkpoint.format.checksum import crc32c
from infinity.optim.rule import OptimizerRule, SavedState
from infinity.tiling.tile import whole_name
from infinity.values.checkpoint_tensors import CheckpointTensor
from infinity.values.component_bytes import MASTER_COMPONENTS, ComponentBytes, components_of_tensor
from swap.storage.components import as_bytes
from swap.tiered import TieredState

_OF_TILES = "steps_of_tiles"


def state_of(
    state: TieredState,
    leaf: CheckpointTensor,
    saved: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> SavedState:
    """What a checkpoint with the state of an optimizer has of that of ``leaf``."""
    name, here = leaf.name, _state_components(state, leaf)
    return SavedState(
        path=path,
        name=name,
        kept_by=saved["optimizer_class"],
        steps=int(saved["steps"][name]),
        components=[
            component for component in saved["planes"][name] if component not in MASTER_COMPONENTS
        ],
        dtypes=saved.get("plane_dtypes", {}).get(name, {}),
        state_dtype=saved.get("state_dtype", torch.float32),
        is_converted=saved["dtypes"][name] != leaf.first.spec.dtype,
        is_tiled_alike=saved.get("parts", {}).get(name) == [part.numel for part in leaf.parts],
        is_trained=leaf.first.spec.trainable,
        here={component.component.name: component.dtype for component in here},
        has_blocks=any(component.component.per > 1 for component in here),
    )


def leaf_of(name: str, saved: Mapping[str, Any]) -> str:
    """What a checkpoint calls that of which ``name`` is a parameter or a tile. A module of the
    program's may be called ``tiles``, too, with parameters that are no tiles.
    """
    return name if name in saved["shapes"] else whole_name(name)


def steps_of_tiles(
    steps: Sequence[int], leaves: Iterable[CheckpointTensor]
) -> dict[str, dict[str, list[int]]]:
    """What is saved of leaves of which some tiles have taken more steps than others, as programs
    have it that clear gradients of some: the counts in their order.
    """
    counts = {leaf.name: [steps[part.index] for part in leaf.parts] for leaf in leaves}
    differing = {name: own for name, own in counts.items() if len({*own}) > 1}
    return {_OF_TILES: differing} if differing else {}


def of_parts(
    leaf: CheckpointTensor, theirs: SavedState, saved: Mapping[str, Any]
) -> list[SavedState]:
    """``theirs``, of ``leaf``, for each of its parts."""
    counts = saved.get(_OF_TILES, {}).get(leaf.name)
    if counts is None or not theirs.is_tiled_alike:  # of what is frozen here: see ``check_steps``
        return [theirs for _ in leaf.parts]
    return [replace(theirs, steps=int(count)) for count in counts]


def check_steps(theirs: SavedState, saved: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for tiles with counts of their own that are cut in another way here."""
    if theirs.name in saved.get(_OF_TILES, {}) and theirs.is_trained and not theirs.is_tiled_alike:
        raise ValueError(
            f"{theirs.path} has tiles of {theirs.name} that have taken different numbers of steps, "
            "and they are cut in another way here; load it with the max_parameter_bytes that it "
            "was saved with"
        )


def with_steps_of_tiles(saved: Mapping[str, Any]) -> list[str]:
    """The leaves whose tiles have taken different numbers of steps."""
    return [*saved.get(_OF_TILES, {})]


def component_dtypes(
    state: TieredState, rule: OptimizerRule, leaves: Iterable[CheckpointTensor]
) -> dict[str, dict[str, torch.dtype]]:
    """Of the state of every leaf, where checkpoints name them."""
    if not rule.names_dtypes:
        return {}
    return {
        leaf.name: {
            component.component.name: component.dtype
            for component in _state_components(state, leaf)
        }
        for leaf in leaves
    }


def must_cast(
    rule: OptimizerRule, saved: Mapping[str, Any], leaf: CheckpointTensor, component: ComponentBytes
) -> bool:
    """Whether what was saved for a state component has another dtype. Before checkpoints named
    them, all state was in float32, or in float64 beside weights of that.
    """
    name = component.component.name
    if name in MASTER_COMPONENTS or not rule.names_dtypes:
        return False
    return _saved_dtype(saved, leaf, name) != component.dtype


def cast(
    read: Callable[..., Any], leaf: CheckpointTensor, component: ComponentBytes, pattern: str
) -> None:
    """Load one component of state that was saved in another dtype, read whole."""
    tree = read(only=[pattern])
    values = tree["optimizer"][component.component.name][leaf.name].reshape(-1).to(component.dtype)
    component.write(0, as_bytes(values).data)


def _saved_dtype(saved: Mapping[str, Any], leaf: CheckpointTensor, name: str) -> torch.dtype:
    found = saved.get("plane_dtypes", {}).get(leaf.name, {}).get(name)
    if found is not None:
        return found  # type: ignore[no-any-return]
    return torch.float64 if saved["dtypes"][leaf.name] == torch.float64 else torch.float32


def _state_components(state: TieredState, leaf: CheckpointTensor) -> list[ComponentBytes]:
    components = components_of_tensor(state, leaf, None)
    return [
        component for component in components if component.component.name not in MASTER_COMPONENTS
    ]


_SAMPLE = 256
"""Values of a frozen parameter that tell one base from another."""


def base_of(state: TieredState, leaves: Iterable[CheckpointTensor]) -> dict[str, int]:
    """A checksum of the first values of each leaf that begins on this rank."""
    return {leaf.name: _checksum(state, leaf) for leaf in leaves if _begins_here(leaf)}


def check_base(
    state: TieredState, leaves: Iterable[CheckpointTensor], saved: Mapping[str, Any], path: Any
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


def _begins_here(leaf: CheckpointTensor) -> bool:
    return leaf.first.first == 0 and leaf.first.spec.numel > 0


def _checksum(state: TieredState, leaf: CheckpointTensor) -> int:
    first = leaf.first
    numel = min(_SAMPLE, math.prod(leaf.shape), first.spec.numel)
    values = torch.empty(numel, dtype=first.spec.dtype, device="cpu")
    state.components.read(first.index, "weight", 0, values)
    return crc32c(as_bytes(values).data)
