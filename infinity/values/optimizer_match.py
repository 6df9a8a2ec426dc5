"""Whether the optimizer state of a checkpoint is of use to the optimizer that a model has now.

Which state means the same to it, its rule says (``OptimizerRule.reads``). Any other is refused by
name: another optimizer would read it as something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infinity.optim.adamw import MOMENTS, NAME, AdamW
from infinity.optim.rule import UNNAMED, OptimizerRule
from infinity.values.checkpoint_tensors import CheckpointTensor
from infinity.values.component_bytes import MASTER_COMPONENTS
from infinity.values.saved_state import check_steps, leaf_of, of_parts, state_of
from swap.tiered import TieredState

PathLike = str | os.PathLike[str]


def told_class(saved: Mapping[str, Any]) -> str | None:
    """Which optimizer kept the state, as far as it can be told where a checkpoint does not say."""
    components = {name for names in saved["planes"].values() for name in names} - {
        *MASTER_COMPONENTS
    }
    options = {key for group in saved["groups"] for key in group} - {"params"}
    if saved["small_state"] or saved.get("plane_dtypes") or "foreach" in options:
        return UNNAMED
    if not components and options == AdamW().defaults().keys():
        return None
    return NAME if components >= {*MOMENTS} else UNNAMED


def takes_state(
    state: TieredState,
    rule: OptimizerRule,
    leaves: Iterable[CheckpointTensor],
    saved: Mapping[str, Any],
    path: PathLike,
) -> bool:
    """Whether the state and the options of a checkpoint are for ``rule``; they are not where one of
    the two has no optimizer.

    Raises ``ValueError`` naming what does not match.
    """
    theirs, ours = saved["optimizer_class"], rule.kept_by
    if theirs is None or ours is None:
        return False
    if not rule.reads(theirs, saved["groups"]):
        raise ValueError(
            f"{path} has the state of {theirs}, and the optimizer is {ours}, which keeps another; "
            "load it with the optimizer that it was saved with, or pass weights= to offload to "
            "begin with its weights alone (a snapshot's are in what offloaded.save(path, "
            "snapshot=name) writes)"
        )
    for leaf in leaves:
        own = state_of(state, leaf, saved, path)
        check_steps(own, saved)
        for part in of_parts(leaf, own, saved):
            rule.check_saved(part)
    return True


def check_options(
    rule: OptimizerRule,
    group: Mapping[str, Any],
    values: Mapping[str, Any],
    saved: Mapping[str, Any],
    path: PathLike,
) -> None:
    """Raises ``ValueError`` for options that ask for state which the other optimizer does not keep:
    those of ``group`` with ``values``, what was saved, in their place.
    """
    theirs = saved["optimizer_class"]
    try:
        rule.check_options(theirs, {**group, **values})
    except ValueError as error:
        raise ValueError(
            f"{path} has the state of {theirs}, which {rule.kept_by} cannot go on from: {error}"
        ) from error


def match_groups(
    ours: Sequence[Iterable[str]], saved: Mapping[str, Any], path: PathLike
) -> list[Mapping[str, Any] | None]:
    """The saved group of every group of the optimizer, whose parameters have the names ``ours``:
    the one with the same members, or where the source of the state has options of parameters only,
    the one with their options. None for one of which no member was trained.

    Raises ``ValueError`` naming parameters that were grouped in another way.
    """
    theirs = {
        leaf_of(name, saved): position
        for position, group in enumerate(saved["groups"])
        for name in group["params"]
    }
    taken: dict[int, str] = {}
    matched: list[Mapping[str, Any] | None] = []
    for members in ours:
        found: dict[int, str] = {}
        for name in members:
            position = theirs.get(leaf_of(name, saved))
            if position is not None:
                found.setdefault(position, name)
        if len(found) > 1:
            first, second, *_ = found.values()
            raise _other_groups(path, first, second, "two groups", "one")
        for position, name in found.items():
            if position in taken and saved.get("is_grouped", True):
                raise _other_groups(path, taken[position], name, "one group", "two")
            taken[position] = name
        matched.append(saved["groups"][next(iter(found))] if found else None)
    return matched


def _other_groups(path: PathLike, first: str, second: str, theirs: str, ours: str) -> ValueError:
    return ValueError(
        f"{path} has {first} and {second} in {theirs} of the optimizer, and the optimizer has them "
        f"in {ours}; group the parameters as they were when it was saved"
    )
