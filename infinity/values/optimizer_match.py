"""Whether the optimizer state of a checkpoint is of use to the optimizer that a model has now.

State goes to an optimizer of the same class. Between ``infinity.AdamW`` and ``torch.optim.AdamW``,
and from ``torch.optim.Adam`` to the first, the moments mean the same, and the step counts are
converted. State of any other class is refused by name: another optimizer would read it as
something else. A class is known by its name without the module, which is ``__main__`` for a script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity.optim.optimizer import AdamW
from infinity.optim.torch_rule import TorchRule
from infinity.optim.torch_state import IN_PLANES
from infinity.values.leaves import Leaf
from infinity.values.plane_bytes import MASTER_PLANES
from swap.plan.rules import MOMENTS, FrozenRule, UpdateRule
from swap.plan.rules import check_options as check_kernel_options
from swap.tiered import TieredState

PathLike = str | os.PathLike[str]
NATIVE = "infinity.AdamW"
OF_MEMBERS = ("params", "param_names")
"""What a group has of each member by its position, and so is never that of another group."""
_UNNAMED = "an optimizer made by a factory"
_TILE = re.compile(r"(^|\.)tiles\.\d+\.(weight|bias)$")


def class_of(rule: UpdateRule) -> str | None:
    """What a checkpoint says kept its state; None: there was no optimizer."""
    if isinstance(rule, FrozenRule):
        return None
    return rule.optimizer_class if isinstance(rule, TorchRule) else NATIVE


def told_class(saved: Mapping[str, Any]) -> str | None:
    """``class_of`` as far as it can be told from a checkpoint that does not say."""
    planes = {name for names in saved["planes"].values() for name in names} - {*MASTER_PLANES}
    options = {key for group in saved["groups"] for key in group} - {"params"}
    if saved["small_state"] or saved.get("plane_dtypes") or "foreach" in options:
        return _UNNAMED
    if not planes and options == AdamW().defaults().keys():
        return None
    return NATIVE if planes >= {*MOMENTS} else _UNNAMED


def takes_state(
    state: TieredState,
    rule: UpdateRule,
    leaves: Iterable[Leaf],
    saved: Mapping[str, Any],
    path: PathLike,
) -> bool:
    """Whether the state and the options of a checkpoint are for ``rule``; they are not where one of
    the two has no optimizer.

    Raises ``ValueError`` naming what does not match.
    """
    theirs, ours = saved["optimizer_class"], class_of(rule)
    if theirs is None or ours is None:
        return False
    if not _is_same_kind(theirs, ours, saved):
        raise ValueError(
            f"{path} has the state of {theirs}, and the optimizer is {ours}, which keeps another; "
            "load it with the optimizer that it was saved with, or pass weights= to offload to "
            "begin with its weights alone"
        )
    if theirs != NATIVE or ours != NATIVE:  # which differ in the dtype of moments alone
        for leaf in leaves:
            _check_planes(state, leaf, saved, path, ours)
    return True


def _is_same_kind(theirs: str, ours: str, saved: Mapping[str, Any]) -> bool:
    if NATIVE in (theirs, ours) and theirs != ours:
        return _is_torch_adam(theirs, saved) if ours == NATIVE else _is_torch_adamw(ours)
    return theirs == _UNNAMED or _last(theirs) == _last(ours)


def _is_torch_adam(theirs: str, saved: Mapping[str, Any]) -> bool:
    if theirs == _UNNAMED:  # the options of Adam and AdamW, which no other optimizer of torch has
        needed = {"betas", "eps", "weight_decay", "amsgrad", "maximize"}
        return all(needed <= group.keys() for group in saved["groups"])
    return theirs.startswith("torch.") and _last(theirs) in ("Adam", "AdamW")


def _is_torch_adamw(ours: str) -> bool:
    return ours.startswith("torch.") and _last(ours) == "AdamW"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _check_planes(
    state: TieredState, leaf: Leaf, saved: Mapping[str, Any], path: PathLike, ours: str
) -> None:
    """Of a parameter that is trained here, and was, all state has a place."""
    if not leaf.first.spec.trainable or not saved["steps"][leaf.name]:
        return
    here = state.plane_names(leaf.first.index)
    for name in saved["planes"][leaf.name]:
        if name not in (*MASTER_PLANES, *here):
            raise ValueError(
                f"{path} has the state {name} of {leaf.name}, which {ours} does not keep as it is "
                "made here; make it with the options that it was saved with"
            )


def check_options(
    rule: UpdateRule,
    group: Mapping[str, Any],
    values: Mapping[str, Any],
    saved: Mapping[str, Any],
    path: PathLike,
) -> None:
    """Raises ``ValueError`` for options that ask for state which the other optimizer does not keep:
    those of ``group`` with ``values``, what was saved, in their place.
    """
    if (class_of(rule) == NATIVE) == (saved["optimizer_class"] == NATIVE):
        return
    try:
        check_kernel_options({**group, **values})
    except ValueError as error:
        theirs = saved["optimizer_class"]
        raise ValueError(
            f"{path} has the state of {theirs}, which {class_of(rule)} cannot go on from: {error}"
        ) from error


def steps_of(leaf: Leaf, saved: Mapping[str, Any]) -> int:
    """How many steps the state of ``leaf`` is from: none where it is not trained, or was not."""
    if not leaf.first.spec.trainable:
        return 0
    is_lost = saved["optimizer_class"] == NATIVE and MOMENTS[0] not in saved["planes"][leaf.name]
    return 0 if is_lost else int(saved["steps"][leaf.name])


def small_state_of(rule: TorchRule, leaf: Leaf, part: str, saved: Mapping[str, Any]) -> Any:
    """What a rule of torch is to keep in memory of a part of ``leaf``."""
    steps = steps_of(leaf, saved)
    small = saved["small_state"].get(part, {})
    if not steps:
        return {}
    if saved["optimizer_class"] == NATIVE:
        # As torch makes it: a count of its own for each parameter.
        return {
            "step": torch.tensor(float(steps), dtype=torch.float32, device="cpu"),
            IN_PLANES: [*MOMENTS],
        }
    planes = rule.state_planes(leaf.first.spec.dtype)
    return planes.restore(small, saved["planes"][leaf.name])


def match_groups(
    ours: Sequence[Iterable[str]], saved: Mapping[str, Any], path: PathLike
) -> list[Mapping[str, Any] | None]:
    """The saved group of every group of the optimizer, whose parameters have the names ``ours``:
    the one with the same members. None for one of which no member was trained.

    Raises ``ValueError`` naming parameters that were grouped in another way.
    """
    theirs = {
        _whole(name): position
        for position, group in enumerate(saved["groups"])
        for name in group["params"]
    }
    taken: dict[int, str] = {}
    matched: list[Mapping[str, Any] | None] = []
    for members in ours:
        found: dict[int, str] = {}
        for name in members:
            position = theirs.get(_whole(name))
            if position is not None:
                found.setdefault(position, name)
        if len(found) > 1:
            first, second, *_ = found.values()
            raise _other_groups(path, first, second, "two groups", "one")
        for position, name in found.items():
            if position in taken:
                raise _other_groups(path, taken[position], name, "one group", "two")
            taken[position] = name
        matched.append(saved["groups"][next(iter(found))] if found else None)
    return matched


def _other_groups(path: PathLike, first: str, second: str, theirs: str, ours: str) -> ValueError:
    return ValueError(
        f"{path} has {first} and {second} in {theirs} of the optimizer, and the optimizer has them "
        f"in {ours}; group the parameters as they were when it was saved"
    )


def _whole(name: str) -> str:
    """The name of the weight or bias that a tile is of; other names as they are."""
    return _TILE.sub(r"\1\2", name)
