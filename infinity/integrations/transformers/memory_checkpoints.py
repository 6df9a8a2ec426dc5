"""Checkpoints of trainers that keep the optimizer in memory, to go on from here.

Their ``optimizer.pt`` numbers the parameters that the optimizer has, in the order of its groups.
The same trainer makes the same groups here, so each number has its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from infinity.commands.foreign.state import (
    MOMENTS,
    NOT_OPTIONS,
    check_kept,
    check_moments,
    check_options,
    step_count,
)
from infinity.commands.foreign.taking import GivenState, check_given, take_given
from infinity.commands.foreign.torch_files import load_mapped, optimizer_in
from infinity.integrations.transformers.lives import Life
from infinity.integrations.transformers.model_files import weights
from infinity.model import training_of


def is_of_memory(folder: Path) -> bool:
    """Whether ``folder`` has the state of an optimizer that was kept in memory."""
    return (folder / OPTIMIZER_NAME).is_file()


def check_and_read_weights(life: Life, folder: Path) -> None:
    """Give the model the weights of ``folder``; its state comes by ``take_state``.

    Raises ``ValueError`` naming what does not fit, and ``FileNotFoundError``, before anything is
    changed.
    """
    if not (folder / SCHEDULER_NAME).is_file():
        raise FileNotFoundError(f"{folder / SCHEDULER_NAME} does not exist")
    load_mapped(folder / SCHEDULER_NAME)  # which is taken last, and must not be what fails then
    model = life.offloaded.model
    absent = weights.absent_from(life.offloaded, folder)
    if absent:
        raise ValueError(
            f"{folder} has no safetensors with {', '.join(absent[:3])} of {type(model).__name__}; "
            f"where all of the model is trained, `infinity import {folder / OPTIMIZER_NAME} "
            f"{folder}/infinity --model {folder}` reads weights of other names, too; else begin "
            f"with its weights: pass weights={str(folder)!r} and leave resume_from_checkpoint out"
        )
    try:
        check_given(training_of(life.offloaded), _state_in(folder, life.numbered))
    except ValueError as error:
        raise ValueError(
            f"{error}. To go on with the weights of {folder} and a new optimizer, resume from a "
            f"copy of it without {OPTIMIZER_NAME} and {SCHEDULER_NAME}"
        ) from error
    weights.read_folder(life.offloaded, folder)


def take_state(life: Life, folder: Path) -> None:
    """Let training go on with the moments, the steps and the options in ``folder``."""
    training = training_of(life.offloaded)
    training.state.flush()
    take_given(training, _state_in(folder, life.numbered))
    training.loaded()


def _state_in(folder: Path, numbered: Sequence[Sequence[str]]) -> GivenState:
    """Tensors stay in the file, which is mapped."""
    path = folder / OPTIMIZER_NAME
    state = optimizer_in(load_mapped(path), path)
    names = _names_by_number(state["param_groups"], numbered, path)
    moments: dict[str, dict[str, torch.Tensor]] = {part: {} for part in MOMENTS}
    steps: dict[str, int] = {}
    for number, kept in state["state"].items():
        if number not in names:
            raise ValueError(f"{path} has state of {number}, which none of its groups has")
        check_kept(kept, names[number], path)
        check_moments(kept, names[number], path, torch.float32)
        steps[names[number]] = step_count(kept["step"], f"step of {names[number]}", path)
        for part in MOMENTS:
            moments[part][names[number]] = kept[part]
    return GivenState(
        moments=moments,
        steps=steps,
        groups=[
            {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            | {"params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
        path=path,
    )


def _names_by_number(
    groups: Sequence[Mapping[str, Any]], numbered: Sequence[Sequence[str]], path: Path
) -> dict[Any, str]:
    theirs, ours = [len(group["params"]) for group in groups], [len(names) for names in numbered]
    if theirs != ours:
        raise ValueError(
            f"{path} has groups of {_listed(theirs)} parameters, and the optimizer of this trainer "
            f"has groups of {_listed(ours)}; train the parameters that were trained then"
        )
    names: dict[Any, str] = {}
    for group, own in zip(groups, numbered, strict=True):
        check_options(group, path)
        names |= dict(zip(group["params"], own, strict=True))
    return names


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts))
