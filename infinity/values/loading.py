"""Checkpoints back into an offloaded model: checked against it first, then streamed into its tiers.

Invariant: nothing of what was there before a load is left. What a checkpoint lacks begins anew:
masters from the weights, optimizer state from zero with a step count of zero.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import checkpoint
from checkpoint.directory.relocation import StripeDirs, relocation
from checkpoint.ranks.coordinator import apart
from infinity.optim.rule import OF_MEMBERS
from infinity.parameters.records import Record
from infinity.values import saved_state
from infinity.values.checkpoint_tensors import checkpoint_tensors_of
from infinity.values.component_bytes import MASTER_COMPONENTS
from infinity.values.load_targets import Targets, check_targets, literal, names_of, targets_of
from infinity.values.module_state import (
    check_modules,
    load_buffers,
    saved_buffers,
    set_module_states,
    tell_buffers,
)
from infinity.values.optimizer_match import (
    check_options,
    match_groups,
    takes_state,
    told_class,
)
from infinity.values.persistence import FORMAT, TrainingState
from infinity.values.rank_state import (
    check_same_save,
    own_buffers,
    restore_own,
    restore_random,
    saves_seen,
)
from swap.interruptions.mixture import Change, Scope
from swap.kernels import merge_master
from swap.plan.layout import Component
from swap.tiered import CHUNK_ELEMENTS, TieredState

logger = logging.getLogger(__name__)
T = TypeVar("T")
Read = Callable[..., Any]
"""``checkpoint.load`` of one path."""
_MAX_LOADS = 20
"""Saves in a row that may each take the place of what is being loaded."""


def load(
    training: TrainingState,
    path: str | os.PathLike[str],
    stripe_dirs: StripeDirs | None = None,
    *,
    begin: Callable[[], None] = lambda: None,
    then: Callable[[], None] = lambda: None,
) -> Any:
    """Undo ``save``, also that of another number of ranks; returns ``extra``.

    What is a rank's own comes back on the rank of that number; a rank beyond those that saved gets
    what rank 0 saved, and a warning says whose state nobody took. Every rank loads the same save,
    however often it is saved over meanwhile. ``stripe_dirs`` is as in ``checkpoint.load``.

    ``begin`` is called before anything is changed, ``then`` when all is loaded, or was stopped, but
    what modules are given by ``set_extra_state``, which is last.

    Raises ``ValueError`` naming what does not match before anything is changed. A failure or an
    interrupt later (a corrupt file, an I/O error) leaves values mixed, and all but loading again is
    refused until that has worked, see ``swap.interruptions.mixture``. What a ``set_extra_state``
    raises leaves that module and those after it with what they had, and everything else loaded.
    """
    read = partial(checkpoint.load, path, stripe_dirs=stripe_dirs)
    fits = partial(check_targets, Path(path).resolve(), relocation(stripe_dirs))
    state = training.state
    with state.changing:
        with state.mixture.changing(f"loading {path}") as change:
            saved, extra, states = _of_one_save(
                training, path, partial(_replace, training, path, read, fits, change, begin, then)
            )
        _set_states(training, saved, states)
    return extra


def _of_one_save(
    training: TrainingState, path: str | os.PathLike[str], replace: Callable[[], T]
) -> T:
    for _ in range(_MAX_LOADS):
        before = saves_seen(training.rank_context, path)
        if len(set(before)) > 1:
            continue
        outcome = replace()
        if saves_seen(training.rank_context, path) == before:
            return outcome
    check_same_save(before, path)
    raise BlockingIOError(
        errno.EAGAIN, f"was saved over {_MAX_LOADS} times before it could be loaded", str(path)
    )


def load_from(
    training: TrainingState,
    path: str | os.PathLike[str],
    read: Read,
    fits: Callable[[Any], None],
    *,
    begin: Callable[[], None] = lambda: None,
    then: Callable[[], None],
) -> Any:
    """Load what ``read`` gives. ``path`` is what errors call it; ``fits`` raises ``ValueError`` for
    targets that it does not fit; ``begin`` is called when it does, before anything is changed.
    """
    state = training.state
    with state.changing:
        with state.mixture.changing(f"loading {path}") as change:
            saved, extra, states = _replace(training, path, read, fits, change, begin, then)
        _set_states(training, saved, states)
    return extra


def _replace(
    training: TrainingState,
    path: str | os.PathLike[str],
    read: Read,
    fits: Callable[[Any], None],
    change: Change,
    begin: Callable[[], None],
    then: Callable[[], None],
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """All but what modules are to be given by ``set_extra_state``, which is returned with what was
    saved and ``extra``.
    """
    ranks = training.rank_context
    saved, targets = apart(ranks.coordinator, lambda: _checked(training, path, read, fits, change))

    def begin_here() -> None:
        begin()
        change.begin(_scope(training, saved))

    apart(ranks.coordinator, begin_here)

    def replace() -> tuple[Any, dict[str, Any]]:
        ranks.weights.drop()
        training.state.num_changes += 1  # for saves that are reading what is set to zero
        for component in absent_state(training, saved):
            training.state.components.zero(component)
        loaded = _load_values(training, saved, targets, read)
        restore_scalars(training, saved, path)
        return loaded

    try:
        extra, states = apart(ranks.coordinator, replace)
    finally:
        training.state.num_changes += 1  # for saves that have begun meanwhile, and wait
        then()
    return saved, extra, states


def _scope(training: TrainingState, saved: Mapping[str, Any]) -> Scope:
    """What a checkpoint replaces: all state, and the weights that it has."""
    leaves = checkpoint_tensors_of(training.model, training.records)
    there = (part.index for leaf in leaves if saved["planes"][leaf.name] for part in leaf.parts)
    return Scope(frozenset(there), frozenset(record.index for record in training.records))


def _set_states(training: TrainingState, saved: Mapping[str, Any], states: dict[str, Any]) -> None:
    give = partial(set_module_states, training.model, states, training.state.device)
    try:
        apart(training.rank_context.coordinator, give)
    finally:  # which may have drawn random numbers
        restore_random(training.rank_context.rank, training.state.device, saved)


def _checked(
    training: TrainingState,
    path: str | os.PathLike[str],
    read: Read,
    fits: Callable[[Any], None],
    change: Change,
) -> tuple[dict[str, Any], Targets]:
    training.state.refusals.check()
    saved = _read_scalars(training, path, read)
    targets = targets_of(training, saved, read)
    fits(targets.same)
    training.state.mixture.check_covered(_scope(training, saved), change.what)
    return saved, targets


def absent_state(training: TrainingState, saved: Mapping[str, Any]) -> set[str]:
    """Components of state that the checkpoint has not of every parameter that has them here."""
    return {
        component
        for leaf in checkpoint_tensors_of(training.model, training.records)
        for component in training.state.component_names(leaf.first.index)
        if component not in MASTER_COMPONENTS and component not in saved["planes"][leaf.name]
    }


def _read_scalars(
    training: TrainingState, path: str | os.PathLike[str], read: Read
) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = read(only=["infinity.*"])["infinity"]
    except ValueError as error:
        if "matches no name" not in str(error):
            raise
        raise ValueError(
            f"{path} is no checkpoint that offloaded.save wrote: it says nothing about training; "
            f"for its weights give infinity.offload(model, ..., weights={str(path)!r}), and read "
            "the rest with checkpoint.load"
        ) from error
    saved.setdefault("optimizer_class", told_class(saved))
    if saved.get("is_foreign"):
        tell_buffers(training.model, saved)
    saved["buffers"] = saved_buffers(saved, path)
    check_fits(training, saved, path)
    if training.rank_context.rank == 0:  # those of other ranks may have other names
        check_modules(training.model, saved, saved["buffers"], path)
    return saved


def check_fits(
    training: TrainingState, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    if saved["format"] != FORMAT:
        raise ValueError(f"{path} has format {saved['format']}; this version reads {FORMAT}")
    shapes = saved["shapes"]
    ours = {
        leaf.name: list(leaf.shape)
        for leaf in checkpoint_tensors_of(training.model, training.records)
    }
    for name, shape in ours.items():
        if name not in shapes:
            raise ValueError(f"{path} has no parameter {name}, which the model has")
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shapes[name]} in {path}, {shape} in the model")
    for name in shapes:
        if name not in ours:
            raise ValueError(f"{path} has a parameter {name}, which the model has not")
    saved_state.check_base(
        training.state, checkpoint_tensors_of(training.model, training.records), saved, path
    )
    if not _takes_state(training, saved, path):
        return
    names = {record.name for record in training.records}
    if training.rule.whole_parameters and not saved["small_state"].keys() <= names:
        raise ValueError(
            f"{path} has optimizer state of layers that were tiled in another way; load it with "
            "the max_parameter_bytes that it was saved with"
        )
    groups = _groups(training, saved, path)
    for group, values in zip(training.optimizer.param_groups, groups, strict=True):
        check_options(training.rule, group, values or {}, saved, path)


def _takes_state(
    training: TrainingState, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> bool:
    leaves = checkpoint_tensors_of(training.model, training.records)
    return takes_state(training.state, training.rule, leaves, saved, path)


def _groups(
    training: TrainingState, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> list[Mapping[str, Any] | None]:
    """What was saved for each group of the optimizer."""
    names = {id(record.parameter): record.name for record in training.records}
    groups = training.optimizer.param_groups
    members = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    return match_groups(members, saved, path)


def _load_values(
    training: TrainingState, saved: Mapping[str, Any], targets: Targets, read: Read
) -> tuple[Any, dict[str, Any]]:
    """Fill what holds values, buffers too; returns ``extra``, and what modules are to be given by
    ``set_extra_state``.
    """
    model, same = training.model, targets.same
    if names := names_of(same):  # none where all is converted
        read(only=names, into=same, staging_bytes=training.checkpoint_bytes)
    for leaf, component in targets.recast:
        saved_state.cast(
            read, leaf, component, literal(f"optimizer.{component.component.name}.{leaf.name}")
        )
    for leaf in targets.bare:
        for part in leaf.parts:
            _reset_master(training.state, part)
    for leaf in targets.converted:
        values = _master(read, leaf.name, saved["planes"][leaf.name]).reshape(-1)
        for part, _, at, _ in leaf.split(0, values.numel(), _WEIGHT):
            kept = at + part.first
            training.state.fill(part.index, values[kept : kept + part.spec.numel])
    load_buffers(
        model,
        saved["buffers"],
        training.state.device,
        lambda name: read(only=[literal(f"model.{name}")])["model"][name],
        converts=targets.buffers,
        keeps=own_buffers(targets.own, model),
    )
    return _load_own(training, saved, targets.own, read)


def _load_own(
    training: TrainingState, saved: Mapping[str, Any], parts: Mapping[str, Any], read: Read
) -> tuple[Any, dict[str, Any]]:
    """Buffers that are this rank's own; the ``extra`` that it returns, and states of modules."""
    states = dict(saved.get("module_states", {}))
    world_size = training.rank_context.world_size
    own, saved_by = saved.get("own_states", []), saved.get("world_size", world_size)
    lost = [other for other in own if other >= world_size]
    if training.rank_context.rank == 0 and own and (lost or saved_by < world_size):
        logger.warning(
            "saved by %d ranks, loaded on %d: %s", saved_by, world_size, _changed(lost, saved_by)
        )
    has_extra, extra, own_states = restore_own(parts, training.model, training.state.device)
    if has_extra:
        return extra, states | own_states
    return read(only=["extra.*"])["extra"].get("value"), states | own_states


def _changed(lost: list[int], saved_by: int) -> str:
    """What becomes of buffers and extra on another number of ranks."""
    if lost:
        return f"buffers and extra of ranks {lost} are not used"
    return f"ranks from {saved_by} on begin with the buffers and extra of rank 0"


_WEIGHT = Component("weight", torch.float32)


def _reset_master(state: TieredState, part: Record) -> None:
    """Let the master be the weights, where nothing more exact was saved."""
    for start in range(0, part.spec.numel, CHUNK_ELEMENTS):
        length = min(CHUNK_ELEMENTS, part.spec.numel - start)
        weights = torch.empty(length, dtype=part.spec.dtype, device="cpu")
        state.components.read(part.index, "weight", start, weights)
        state.write_values(part.index, start, weights)


def _master(read: Read, name: str, components: Sequence[str]) -> torch.Tensor:
    """The values of one parameter in the precision of its saved master, read whole."""
    rest = [
        f"optimizer.{component}.{name}" for component in components if component in ("lo", "master")
    ]
    wanted = [f"model.{name}", *rest]
    tree = read(only=[literal(entry) for entry in wanted])
    weight: torch.Tensor = tree["model"][name]
    others = tree.get("optimizer", {})
    if "master" in components:
        master: torch.Tensor = others["master"][name]
        return master
    if "lo" not in components:
        return weight
    out = torch.empty(weight.numel(), dtype=torch.float32, device="cpu")
    merge_master(weight.reshape(-1), others["lo"][name].reshape(-1), out)
    return out.view(weight.shape)


def restore_scalars(
    training: TrainingState, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    is_taken = _takes_state(training, saved, path)
    training.steps[:] = [0] * len(training.steps)
    training.rule.forget_state(training.optimizer.param_groups)
    if is_taken:
        _restore_state(training, saved, path)
    training.reference.loaded(saved.get("state") if is_taken else None, path)
    if training.loss_scale_state is not None:
        training.loss_scale_state.restore(saved["loss_scale"])


def _restore_state(
    training: TrainingState, saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    """Step counts and options, and what the rule keeps in memory of every parameter."""
    for leaf in checkpoint_tensors_of(training.model, training.records):
        theirs = saved_state.state_of(training.state, leaf, saved, path)
        for part, own in zip(leaf.parts, saved_state.of_parts(leaf, theirs, saved), strict=True):
            steps = training.rule.steps(own) if own.is_trained else 0
            training.steps[part.index] = steps
            if steps:
                small = saved["small_state"].get(part.name, {})
                training.rule.restore(part.index, leaf.first.spec.dtype, own, small)
    groups = _groups(training, saved, path)
    for group, values in zip(training.optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in (values or {}).items() if k not in OF_MEMBERS})
