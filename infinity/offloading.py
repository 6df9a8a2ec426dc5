"""``infinity.offload``: from a model and a budget to an ``OffloadedModel``, and back."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from infinity.activations.tiers import activations_for
from infinity.arguments import (
    Arguments,
    Directories,
    Options,
    checked,
    device_of,
    warn_of,
    warn_of_ranks,
    warn_of_rounding,
)
from infinity.autograd.lost_values import check_not_held
from infinity.autograd.refusals import AfterBlock, check_model
from infinity.block import Claim, OffloadBlock
from infinity.model import OffloadedModel
from infinity.optim.adamw import AdamW
from infinity.optim.chosen import optimizer_for, rule_for
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import OptimizerFactory
from infinity.optim.rule import NativeOptimizer
from infinity.parameters.compiled import NamesOfModules
from infinity.parameters.offloaded.placeholders import is_lost
from infinity.parameters.records import Record, records_of
from infinity.parameters.structure import WithoutWeakReferences
from infinity.planning.placing import (
    demand_of,
    expects_steps,
    has_room_for_freed_memory,
    place_within,
)
from infinity.ranks.agreement import (
    check_devices,
    check_same,
    divided_by_ranks,
    facts_of,
    on_all_ranks,
    open_ranks,
    ranks_here,
)
from infinity.ranks.collectives import Ranks
from infinity.ranks.context import RankContext, SingleRank
from infinity.ranks.gather_plan import GatherPlan
from infinity.ranks.gathered_weights import GatherMemory
from infinity.ranks.zero3 import Zero3
from infinity.snapshots.points import Snapshots
from infinity.tiling.layers import Tiling
from infinity.training import Parts, Training
from infinity.values.buffers.conversion import BufferConversion
from infinity.values.initial.materialize import fill_all, values_for
from swap.device.opening import open_device
from swap.interruptions.undo import Undo
from swap.memory.heap import SmallHeap, give_back_freed_memory
from swap.plan.placement import Placement
from swap.plan.rules import UpdateRule
from swap.processors import share_with
from swap.storage.drives.bandwidth import shares
from swap.storage.drives.directory import reclaim
from swap.tiered import TieredState

_DEFAULT_OPTIMIZER = AdamW()
_HOLDS_MEMORY = (
    *("state", "gradients", "rank_context", "activations", "residency", "versions"),
    *("loans", "_saved", "_views", "_hooks", "_phases", "_restoring"),
)
"""Of a training, what leads to host memory."""


def offload(
    model: nn.Module,
    nvme: Directories,
    *,
    optimizer: NativeOptimizer | OptimizerFactory | None = _DEFAULT_OPTIMIZER,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_grad_norm: float | None = None,
    activations: str = "keep",
    weights: str | os.PathLike[str] | None = None,
    max_parameter_bytes: int | str | None = None,
    overlap: bool = True,
    verify_swap: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> OffloadBlock:
    """Train or run ``model`` unchanged with its state on NVMe, within the budget, inside the block.

    - ``nvme``: a directory, or one for each SSD. Swap files live there while the block runs;
      nothing stays but what snapshots keep.
    - ``optimizer``: ``AdamW(...)`` for the native kernel, a factory ``params ->
      torch.optim.Optimizer`` for any other, None for inference. Gradients at its end: TUNING.
    - ``device``: where to compute; None takes CUDA if there is one, else the CPU.
    - ``compute_dtype``: dtype of weights, gradients and floating-point buffers, as
      ``model.to(dtype)`` (see TUNING for ties); masters of what is trained are kept in float32.
      Frozen weights come back rounded to it, with a warning how many, as all do with
      ``optimizer=None``, and unchanged buffers as they came. None keeps each parameter's dtype.
    - ``device_memory``: most bytes for weights, and for state that has room, on a GPU;
      ``host_memory``: most bytes of host memory taken (default: half of what is free); ``"8GiB"``.
    - ``max_grad_norm``: clip the gradients of every step to this 2-norm.
    - ``activations``: what autograd saves for the backward pass, ``"keep"`` leaves to it;
      ``"nvme"`` moves it to ``nvme`` but for the latest, within ``host_memory``; ``"host"`` moves
      it from a GPU to pinned memory, within ``host_memory``, and counts it on a CPU.
    - ``weights``: a safetensors file or folder, or a checkpoint of ours, to take the values from;
      of what ``offloaded.save`` wrote, the float32 masters wherever more than the weights in the
      dtype of that run is kept here. Without, see ``infinity/values/initial/initialisers.py``.
    - ``max_parameter_bytes``: weights of ``nn.Linear``, ``nn.Embedding``,
      ``nn.MultiheadAttention`` and experts of transformers that are larger (in the compute dtype)
      are cut into tiles of rows inside the block. See "Tiles" in ``docs/TUNING.md``.
    - ``overlap=False`` does one transfer after the other, for measuring what overlap is worth.
    - ``verify_swap=True`` compares what is read from swap files with checksums of what was written:
      damage is a ``CorruptSwapError`` that names the parameter. Takes a thousandth of their size of
      ``host_memory``. See "Damaged swap files" in ``docs/GUARANTEES.md``.
    - ``process_group``: ranks (of torchrun, say) that partition the model between them and average
      their gradients, such as ``torch.distributed.group.WORLD``; each trains its own without.

    Nothing is done before the block that this returns is entered, by ``with`` or ``ExitStack``. On
    leaving, parameters are real tensors with the trained values again. Those that came on meta are
    there again, and on the CPU torch refuses not every use of that: take values inside (``export``,
    ``gathered``). So is what cannot be read any more, see ``RestoreError``, or was mixed by a load
    that was stopped, see ``MixedStateError``. Entering raises ``ValueError``, ``TypeError``,
    ``BudgetError`` (with the least budget that works) or ``OSError``; the model is as it was then.
    """
    given = Arguments(
        nvme=nvme,
        optimizer=optimizer,
        device=device,
        compute_dtype=compute_dtype,
        device_memory=device_memory,
        host_memory=host_memory,
        max_grad_norm=max_grad_norm,
        activations=activations,
        weights=weights,
        max_parameter_bytes=max_parameter_bytes,
        overlap=overlap,
        verify_swap=verify_swap,
        process_group=process_group,
    )
    return OffloadBlock(model, partial(_begin, model, given))


def _begin(model: nn.Module, given: Arguments, undo: Undo) -> OffloadedModel:
    try:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, not an nn.Module")
        target = device_of(given.device)
    except Exception:
        # Of whatever kind, the others are waiting: this rank comes there to tell them.
        with on_all_ranks(open_ranks(undo, given.process_group, torch.device("cpu"))):
            raise
    ranks = open_ranks(undo, given.process_group, target)
    with on_all_ranks(ranks):
        options = checked(given, target)
    if ranks is not None:
        num_here = ranks_here(ranks)
        undo.callback(share_with(num_here))
        if given.host_memory is None:
            options = options.among(num_here)
    warn_of(options)
    warn_of_ranks(given)
    return _enter(undo, model, options, ranks)


def _enter(undo: Undo, model: nn.Module, options: Options, ranks: Ranks | None) -> OffloadedModel:
    """Offload ``model``; ``undo`` undoes all of it."""
    dtype = options.compute_dtype
    with on_all_ranks(ranks):
        claim = _take_over(undo, model)
        snapshots = _reclaimed(options.directories)
        records = records_of(model, dtype)
        values = values_for(model, records, options.weights)
        if options.max_parameter_bytes is not None:
            tiling = undo.enter_context(_tiling(model, records, options, ranks, claim))
            records = records_of(model, dtype)
            values = tiling.values(values, records)
        rule, inner = rule_for(options.optimizer, records)
        warn_of_rounding(records, trains=rule.kept_by is not None)
        if ranks is not None:
            rule.check_slices()
    if ranks is not None:
        check_same(ranks, facts_of(model, records, rule, options.facts()))
        check_devices(ranks, options.device)
        records = records_of(model, dtype, rank=ranks.rank, world_size=ranks.world_size)
    with on_all_ranks(ranks):
        kind = {"is_partitioned": ranks is not None, "verifies": options.verify_swap}
        kind["speculates"] = options.overlap and expects_steps(rule, dtype)
        demand = demand_of(model, records, rule, options.share, **kind)
        placed = place_within(demand, options.budget)
    if not has_room_for_freed_memory(demand, placed, options.budget):
        undo.enter_context(SmallHeap())
    state = _open_state(undo, placed.placement, rule, options, ranks, snapshots.close)
    with on_all_ranks(ranks):
        room = options.budget.host_bytes, options.directories
        activations = activations_for(options.share, *room, state.timeline, state.compute, undo)
        undo.callback(activations.close)
    rank_context = _rank_context(undo, records, state, placed.gathering, options, ranks)
    training = Training(
        Parts(
            model=model,
            records=records,
            state=state,
            rule=rule,
            budget=options.budget,
            optimizer_for=partial(optimizer_for, options.optimizer, inner, records),
            activations=activations,
            max_grad_norm=options.max_grad_norm,
            loss_scale=LossScale() if dtype == torch.float16 else None,
            compute_dtype=dtype,
            checkpoint_bytes=placed.placement.checkpoint_bytes,
            rank_context=rank_context,
            run=_name_of_run(ranks),
        )
    )
    undo.callback(partial(_let_go, training))
    with on_all_ranks(ranks):
        fill_all(state, records, values, rank_context, memory_bytes=training.checkpoint_bytes)
        if options.weights is None:
            _refuse_lost(state, records)
    rank_context.agree_on_values()
    undo.enter_context(BufferConversion(model, options.device, dtype, values, training.begun))
    activations.leave_alone(model.buffers())
    undo.enter_context(WithoutWeakReferences(model))
    training.attach(undo)
    _wait_for_others(undo, training, snapshots)
    give_back_freed_memory()  # which the model had its values in
    return OffloadedModel(training, snapshots)


def _refuse_lost(state: TieredState, records: Sequence[Record]) -> None:
    """Where an earlier block lost what parameters were trained to: until that is loaded."""
    without = [record.index for record in records if is_lost(record.parameter)]
    state.mixture.begin_without(without, "none, since no weights= were given")


def _tiling(
    model: nn.Module,
    records: Sequence[Record],
    options: Options,
    ranks: Ranks | None,
    claim: Claim,
) -> Tiling:
    assert options.max_parameter_bytes is not None
    return Tiling(
        model,
        records,
        options.max_parameter_bytes,
        options.compute_dtype,
        device=options.device,
        is_partitioned=ranks is not None,
        claim=claim.take,
    )


def _let_go(training: Training) -> None:
    """The last of the end: a program has ``offloaded`` and its optimizer still, as a rule for as
    long as it runs, and all host memory of the block would stay taken.
    """
    assert vars(training).keys() >= {*_HOLDS_MEMORY}
    vars(training).update(dict.fromkeys(_HOLDS_MEMORY, AfterBlock()))


def _take_over(undo: Undo, model: nn.Module) -> Claim:
    """No other block takes any of ``model`` from now on, until all of this one has ended."""
    check_model(model)
    claim = Claim()
    undo.callback(claim.end)
    claim.take(model.named_parameters())
    undo.enter_context(NamesOfModules(model))
    check_not_held(model)
    return claim


def _wait_for_others(undo: Undo, training: Training, snapshots: Snapshots) -> None:
    """The end of the block begins with what other threads are in the midst of, steps first."""
    undo.callback(snapshots.end)
    undo.callback(training.saves.end)
    undo.callback(training.state.end_steps)


def _reclaimed(directories: Sequence[str]) -> Snapshots:
    """The snapshots on ``directories``, when what dead processes left there is gone."""
    for directory in directories:
        reclaim(directory)
    snapshots = Snapshots(directories)
    snapshots.give_back_orphans()
    return snapshots


def _name_of_run(ranks: Ranks | None) -> str:
    name = uuid.uuid4().hex
    return name if ranks is None else ranks.coordinator.exchange(name)[0]


def _open_state(
    undo: Undo,
    placement: Placement,
    rule: UpdateRule,
    options: Options,
    ranks: Ranks | None,
    after_close: Callable[[], None],
) -> TieredState:
    bandwidths = shares(options.directories)
    if ranks is not None:
        bandwidths = divided_by_ranks(ranks, options.directories, bandwidths)
    with on_all_ranks(ranks):
        state = TieredState(
            placement,
            rule,
            options.directories,
            shares=bandwidths,
            device=open_device(options.device),
            overlap=options.overlap,
            undo=undo,
            after_close=after_close,
        )
    return state


def _rank_context(
    undo: Undo,
    records: Sequence[Record],
    state: TieredState,
    plan: GatherPlan | None,
    options: Options,
    ranks: Ranks | None,
) -> RankContext:
    if ranks is None or plan is None:
        return SingleRank(state)
    capacity = min(ranks.coordinator.exchange(plan.capacity_bytes))
    memory = GatherMemory(plan.nbytes, options.device)
    undo.callback(memory.close)
    return Zero3(ranks, records, state, memory, capacity_bytes=capacity, prefetch=options.overlap)
