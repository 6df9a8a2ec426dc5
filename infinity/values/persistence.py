"""Checkpoints of an offloaded model: its state as a tree of byte sources; ``loading`` is the way
back.

Nothing is gathered: a save streams every component from its home tier. The tree is

- ``model.<name>``: weights in the compute dtype, and the model's persistent buffers;
- ``optimizer.<component>.<name>``: lo, master, exp_avg, ... (see ``swap.storage.components``), in
  the shape of the parameter;
- ``infinity``: step counts, groups, loss scale, torch's random state, small optimizer state, extra
  state of modules;
- ``extra.value``: whatever the caller gave;
- ``ranks.<r>``: buffers, state of modules and extra of rank r that are not those of rank 0, see
  ``rank_state``;

so ``model.*`` alone is an ordinary set of weights, in the compute dtype. With ``only_trainable``
frozen parameters are in none of the first two, have no components in ``infinity.planes``, and a
checksum of their first values in ``infinity.base``. A parameter that is tiled is one tensor, see
``checkpoint_tensors``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from torch import nn

import checkpoint
from aio.errors import check_flag, is_flag
from checkpoint.directory.generations import remove_checkpoint
from checkpoint.ranks.coordinator import (
    Arrival,
    Operation,
    accompanied,
    tell,
)
from checkpoint.ranks.turn import Turn, before_turn
from checkpoint.saving.api import SaveRequest, save_on, start_save
from checkpoint.saving.unguarded import copied_tree
from infinity.autograd.versions import Versions
from infinity.background import BackgroundSaves
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import OffloadedOptimizer
from infinity.optim.rule import OptimizerRule
from infinity.optim.state_reference import StateReference
from infinity.parameters.records import Record
from infinity.ranks.context import RankContext
from infinity.values import saved_state
from infinity.values.checkpoint_tensors import CheckpointTensor, checkpoint_tensors_of
from infinity.values.component_bytes import BytesOfRank, Saving, components_of_tensor
from infinity.values.module_state import buffers_of, module_states, persistent_buffers
from infinity.values.rank_state import (
    own_states,
    random_of_ranks,
    random_state,
)
from swap.tiered import TieredState

logger = logging.getLogger(__name__)
FORMAT = 1


class TrainingState(Protocol):
    """What is saved and loaded: the parts of an ``OffloadedModel``."""

    model: nn.Module
    optimizer: OffloadedOptimizer
    rule: OptimizerRule
    records: list[Record]
    state: TieredState
    steps: list[int]
    loss_scale_state: LossScale | None
    checkpoint_bytes: int
    rank_context: RankContext
    reference: StateReference
    versions: Versions
    saves: BackgroundSaves


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """``block``: until it is durable; ``only_trainable``: without what is frozen.

    Raises ``TypeError`` for what is neither True nor False: of ``save(path, extra)``, as other
    saves have it, the ``extra`` would be lost without a word.
    """

    block: bool = True
    stripe_dirs: Sequence[str | os.PathLike[str]] | None = None
    only_trainable: bool = False

    def __post_init__(self) -> None:
        if not is_flag(self.block):
            raise TypeError(
                f"block is a {type(self.block).__name__}, not True or False; what is to be saved"
                " beside the training goes by its name, extra=..."
            )
        check_flag("only_trainable", self.only_trainable)


def save(training: TrainingState, path: str | os.PathLike[str], extra: Any, how: How) -> Any:
    """Save everything that training goes on from, once the update is flushed.

    Raises ``ValueError`` for ``only_trainable`` where nothing is trained.

    Without ``block`` the bytes are read while training goes on: nothing at home changes before the
    next step, which waits until they have been read. Buffers may change in a forward pass, so they
    are copied first, as is the extra state.

    Several ranks save one checkpoint, each what it keeps, see ``rank_state``.
    """
    ranks = training.rank_context.coordinator

    def way(arrival: Arrival) -> Any:
        # What fails in there fails on all ranks, which then all say so in the next meeting.
        own = own_states(ranks, training.model, extra, partial(_make_ready, training))
        warn_of_gradients(training, path)
        training.reference.saved(path)
        request = SaveRequest(
            state=_state(training, own, extra, how),
            path=path,
            stripe_dirs=how.stripe_dirs,
            ranks=ranks,
            arrival=arrival,
            staging_bytes=training.checkpoint_bytes,
        )
        if how.block:
            return save_on(request)
        guarded = replace(request, guard=training.optimizer)
        return start_save(guarded, on_begun=training.saves.add)

    # From within what tells the other ranks: an interrupt may come anywhere in it.
    return accompanied(
        ranks, Operation.SAVE, lambda arrival: training.saves.before_end(partial(way, arrival))
    )


def _make_ready(training: TrainingState) -> None:
    """What may fail on one rank alone, and is told to the others."""
    training.saves.check_open()
    training.state.flush()


def _state(
    training: TrainingState, own: dict[str, BytesOfRank], extra: Any, how: How
) -> dict[str, Any]:
    """What this rank saves; copies of what a forward pass may change while it is read."""
    state = _sources(training, only_trainable=how.only_trainable)
    state["infinity"] = {
        "random_of_ranks": random_of_ranks(training.rank_context, training.state.device)
    }
    if training.rank_context.world_size > 1:
        state["ranks"] = own
    if training.rank_context.rank:
        return state
    buffers = persistent_buffers(training.model)
    given = {"given": extra is not None, "value": extra}
    state["infinity"] |= scalars_of(training)
    if how.only_trainable:
        state["infinity"] |= _without_frozen(training, state["infinity"])
    state["infinity"]["own_states"] = [int(rank) for rank in own]
    if not how.block:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        states = {"module_states": state["infinity"]["module_states"]}
        own_tree = copied_tree({"infinity": states, "extra": given})
        given = own_tree["extra"]
        state["infinity"] |= own_tree["infinity"]
    state["model"] |= buffers
    state["extra"] = given
    return state


def warn_of_gradients(training: TrainingState, path: str | os.PathLike[str]) -> None:
    """One warning where gradients are accumulated: they are no part of what is saved."""
    count = len(training.state.gradients.present)
    if count:
        logger.warning(
            "%s is saved without the gradients that %d parameters have accumulated since the last "
            "step; save after step(), or they are missing when training goes on from there",
            path,
            count,
        )


def _without_frozen(training: TrainingState, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What differs where frozen weights are left out: they have no components, but are known."""
    leaves = checkpoint_tensors_of(training.model, training.records)
    frozen = [leaf for leaf in leaves if not leaf.first.spec.trainable]
    components: Mapping[str, Any] = scalars["planes"]
    return {
        "planes": {**components, **{leaf.name: [] for leaf in frozen}},
        "base": saved_state.base_of(training.state, frozen),
    }


def _sources(training: TrainingState, *, only_trainable: bool) -> dict[str, Any]:
    leaves = checkpoint_tensors_of(training.model, training.records)
    if only_trainable:
        leaves = [leaf for leaf in leaves if leaf.first.spec.trainable]
        if not leaves:
            raise ValueError("only_trainable=True, and no parameter of the model is trained")
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    saving = _saving(training)
    for leaf in leaves:
        for component in components_of_tensor(training.state, leaf, saving):
            name = component.component.name
            part = model if name == "weight" else optimizer.setdefault(name, {})
            part[leaf.name] = component
    return {"model": model, "optimizer": optimizer}


def _saving(training: TrainingState) -> Saving:
    """The state of now, which no step of another thread, and no change in place, is to change while
    it is saved.
    """
    since, watch = training.state.num_changes, training.versions.watch_at_home()
    training.state.finish_step()
    ranks = training.rank_context
    return Saving(ranks.rank, ranks.world_size, since=since, watch=watch)


def scalars_of(training: TrainingState) -> dict[str, Any]:
    """What is saved beside tensors: counts, groups, options, random state, and what is where."""
    training.rule.check_saving()
    leaves = checkpoint_tensors_of(training.model, training.records)
    scale = training.loss_scale_state
    small = training.rule.small_state
    return {
        "format": FORMAT,
        "steps": {leaf.name: training.steps[leaf.first.index] for leaf in leaves},
        **saved_state.steps_of_tiles(training.steps, leaves),
        "planes": {
            leaf.name: list(training.state.component_names(leaf.first.index)) for leaf in leaves
        },
        "shapes": {leaf.name: list(leaf.shape) for leaf in leaves},
        "dtypes": {leaf.name: leaf.first.spec.dtype for leaf in leaves},
        "groups": [_named(group, training, leaves) for group in training.optimizer.param_groups],
        "optimizer_class": training.rule.kept_by,
        "plane_dtypes": saved_state.component_dtypes(training.state, training.rule, leaves),
        "state_dtype": training.rule.state_dtype,
        "state": training.reference.name,
        "parts": {leaf.name: [part.numel for part in leaf.parts] for leaf in leaves},
        "buffers": {name: b is not None for name, b in buffers_of(training.model).items()},
        "module_states": module_states(training.model),
        "loss_scale": None if scale is None else scale.saved(),
        "small_state": {training.records[index].name: dict(s) for index, s in small.items()},
        "random": random_state(),
        "world_size": training.rank_context.world_size,
    }


def _named(
    group: Mapping[str, Any], training: TrainingState, leaves: Sequence[CheckpointTensor]
) -> dict[str, Any]:
    """``group`` with the names of its parameters, in the order that they have without tiles: who
    reads the state elsewhere goes by it.
    """
    records = {id(record.parameter): record for record in training.records}
    members = [records[id(parameter)] for parameter in group["params"]]
    given = group.get("param_names")
    names = given or [member.name for member in members]
    pairs = _without_tiles([*zip(members, names, strict=True)], leaves)
    named = {"params": [member.name for member, _ in pairs]}
    return {**group, **named, **({"param_names": [own for _, own in pairs]} if given else {})}


def _without_tiles(
    pairs: Sequence[tuple[Record, str]], leaves: Sequence[CheckpointTensor]
) -> list[tuple[Record, str]]:
    """``pairs`` in the order that they have without tiles. Each stretch of them in the order of the
    model, or all of them in the opposite one, is what some part of it gave as its parameters.
    """
    indices = [member.index for member, _ in pairs]
    if len(indices) > 1 and indices == sorted(indices, reverse=True):
        return _without_tiles(pairs[::-1], leaves)[::-1]
    parts = (part.index for leaf in leaves for part in leaf.parts)
    order = {index: position for position, index in enumerate(parts)}
    ends = [at for at in range(1, len(pairs)) if indices[at] < indices[at - 1]]
    stretches = (pairs[start:stop] for start, stop in pairwise([0, *ends, len(pairs)]))
    return [
        pair
        for stretch in stretches
        for pair in sorted(stretch, key=lambda pair: order[pair[0].index])
    ]


def export(training: TrainingState, folder: str | os.PathLike[str]) -> list[str]:
    """Weights and persistent buffers as Hugging Face shards with an index; returns the paths.

    Several ranks first save the weights together, in a folder beside, from which rank 0 makes the
    shards: no rank ever has the model. Buffers are those of rank 0. What ends that on one rank,
    wherever it is, ends it on all.
    """
    ranks, staging = training.rank_context.coordinator, training.checkpoint_bytes
    before_end = training.saves.before_end
    if ranks.world_size == 1:
        return before_end(partial(_export_alone, training, folder))
    arrival = Arrival()

    def tell_before(error: BaseException) -> None:
        if arrival.is_for("error"):
            with suppress(type(error)):
                tell(ranks, Operation.SAVE, error)

    def look(turn: Turn) -> list[str]:
        parts = Path(folder).absolute().with_name(f".{Path(folder).name}.parts")
        state = {"model": _weights_of_rank(training)}
        info = save_on(
            SaveRequest(
                state=state, path=parts, ranks=ranks, arrival=arrival, staging_bytes=staging
            )
        )
        turn.begin()
        is_first = training.rank_context.rank == 0
        merge: Callable[[], list[str]] = partial(_merge, info, folder) if is_first else list
        return turn.together(merge, ends=lambda _: True)[0]

    return before_turn(
        ranks, Operation.EXPORT, lambda turn: before_end(partial(look, turn)), tell_before
    )


def _export_alone(training: TrainingState, folder: str | os.PathLike[str]) -> list[str]:
    weights, staging = _weights_of_rank(training), training.checkpoint_bytes
    files = checkpoint.write_safetensors(weights, folder, staging_bytes=staging)
    return [os.fspath(file) for file in files]


def _weights_of_rank(training: TrainingState) -> dict[str, Any]:
    _make_ready(training)
    saving = _saving(training)
    weights: dict[str, Any] = dict(persistent_buffers(training.model)) if saving.rank == 0 else {}
    for leaf in checkpoint_tensors_of(training.model, training.records):
        components = components_of_tensor(training.state, leaf, saving)
        weights[leaf.name] = components[0]
    return weights


def _merge(info: checkpoint.SaveInfo, folder: str | os.PathLike[str]) -> list[str]:
    """Shards of what ranks saved, which is removed then."""
    try:
        files = checkpoint.export_safetensors(info.path, folder, prefix="model.")
    finally:
        remove_checkpoint(info.path, info.uuid)
    return [os.fspath(file) for file in files]
