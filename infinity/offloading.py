"""``infinity.offload``: from a model and a budget to an ``OffloadedModel``, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import nn

from infinity.activation_tiers import ActivationShare, activations_for, mode_of
from infinity.bandwidth import shares
from infinity.buffers import BufferConversion
from infinity.chosen_optimizer import optimizer_for, rule_for
from infinity.collectives import Ranks
from infinity.discovery import RESIDENT_ELEMENTS, Record, least_arena_bytes, records_of
from infinity.gather_plan import GatherPlan, gather_plans
from infinity.gathered_weights import GatherMemory
from infinity.loss_scale import LossScale
from infinity.materialize import fill_all, values_for
from infinity.model import OffloadedModel
from infinity.optimizer import AdamW, OptimizerFactory, TorchRule
from infinity.over_ranks import OverRanks
from infinity.rank_agreement import (
    check_devices,
    check_same,
    facts_of,
    open_ranks,
    ranks_here,
    shared_shares,
    together,
)
from infinity.sharing import Sharing, Unshared
from infinity.tiling import MIN_TILE_BYTES, Tiling
from swap.directory import check_usable, reclaim
from swap.placement import Placement, place
from swap.rules import UpdateRule
from swap.tiered import TieredState
from swap.tiers import Budget, BudgetError, format_bytes, parse_bytes

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_DEFAULT_OPTIMIZER = AdamW()
_DEVICE_SHARE = 0.5
"""Part of the free device memory that weights take by default; activations have the rest."""


@contextmanager
def offload(
    model: nn.Module,
    nvme: Directories,
    *,
    optimizer: AdamW | OptimizerFactory | None = _DEFAULT_OPTIMIZER,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_grad_norm: float | None = None,
    activations: str = "keep",
    weights: str | os.PathLike[str] | None = None,
    max_parameter_bytes: int | str | None = None,
    overlap: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Iterator[OffloadedModel]:
    """Train (or run) ``model`` unchanged with its state on NVMe, within the budget, inside the
    block.

    - ``nvme``: a directory, or one for each SSD. Swap files live there while the block runs,
      nothing stays.
    - ``optimizer``: ``AdamW(...)`` for the native kernel, a factory ``params ->
      torch.optim.Optimizer`` for any other, None for inference.
    - ``device``: where to compute; None takes CUDA if there is one, else the CPU.
    - ``compute_dtype``: dtype of weights, gradients and floating-point buffers, as
      ``model.to(dtype)``; masters are kept in float32. None keeps each parameter's dtype.
    - ``device_memory``: most bytes of weights resident for compute; ``host_memory``: most bytes of
      host memory that the library takes (default: half of what is free). Ints, or text such as
      ``"8GiB"``.
    - ``max_grad_norm``: clip the gradients of every step to this 2-norm.
    - ``activations``: what autograd saves for the backward pass, ``"keep"`` leaves to it;
      ``"nvme"`` moves it to ``nvme`` but for the latest, within ``host_memory``; ``"host"`` moves
      it from a GPU to pinned memory, within ``host_memory``, and counts it on a CPU.
    - ``weights``: a safetensors file or folder, or a checkpoint of ours, to take the values from.
    - ``max_parameter_bytes``: weights of ``nn.Linear`` layers that are larger (in the compute
      dtype) are cut into tiles inside the block, see ``TiledLinear``; the layers come back after.
    - ``overlap=False`` does one transfer after the other, for measuring what overlap is worth.
    - ``process_group``: ranks (of torchrun, say) that partition the model between them and average
      their gradients; ``torch.distributed.group.WORLD`` is all of them. See
      ``docs/ARCHITECTURE.md``.

    On leaving, parameters are real tensors with the trained values again, or on meta if they came
    so. Raises ``ValueError``, ``TypeError``, ``BudgetError`` (with the least budget that works) or
    ``OSError``; the model is as it was then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module")
    target = _device(device)
    with ExitStack() as stack:
        ranks = open_ranks(stack, process_group, target)
        with together(ranks):
            directories = directories_of(nvme)
            mode = mode_of(activations)
            options = _Options(
                directories=directories,
                optimizer=optimizer,
                device=target,
                compute_dtype=compute_dtype,
                budget=make_budget(host_memory, device_memory, target),
                max_grad_norm=_checked_norm(max_grad_norm),
                share=ActivationShare(mode=mode, device=target, num_directories=len(directories)),
                weights=weights,
                max_parameter_bytes=parameter_bound(max_parameter_bytes),
                overlap=overlap,
            )
        if host_memory is None and ranks is not None:
            options = options.among(ranks_here(ranks))
        yield _enter(stack, model, options, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of ``offload``, checked one by one."""

    directories: list[str]
    optimizer: AdamW | OptimizerFactory | None
    device: torch.device
    compute_dtype: torch.dtype | None
    budget: Budget
    max_grad_norm: float | None
    share: ActivationShare
    weights: str | os.PathLike[str] | None
    max_parameter_bytes: int | None
    overlap: bool

    def among(self, ranks: int) -> _Options:
        """With this rank's part of the host memory that so many on one machine share."""
        host_bytes = self.budget.host_bytes // ranks
        return replace(self, budget=replace(self.budget, host_bytes=host_bytes))

    def facts(self) -> dict[str, object]:
        """What has to be the same on every rank."""
        names = ("compute_dtype", "max_grad_norm", "max_parameter_bytes", "overlap")
        facts: dict[str, object] = {name: getattr(self, name) for name in names}
        facts["activations"] = self.share.mode
        if self.optimizer is None or isinstance(self.optimizer, AdamW):
            facts["optimizer"] = self.optimizer
        return facts


def _enter(
    stack: ExitStack, model: nn.Module, options: _Options, ranks: Ranks | None
) -> OffloadedModel:
    """Offload ``model``; ``stack`` undoes all of it."""
    dtype = options.compute_dtype
    with together(ranks):
        for directory in options.directories:
            reclaim(directory)
        records = records_of(model, dtype)
        values = values_for(model, records, options.weights)
        if options.max_parameter_bytes is not None:
            tiling = Tiling(model, records, options.max_parameter_bytes, dtype)
            stack.enter_context(tiling)
            records = records_of(model, dtype)
            values = tiling.values(values, records)
        rule, inner = rule_for(options.optimizer, records)
        if isinstance(rule, TorchRule) and ranks is not None:
            rule.check_elementwise()
    if ranks is not None:
        check_same(ranks, facts_of(model, records, rule, options.facts()))
        check_devices(ranks, options.device)
        records = records_of(model, dtype, rank=ranks.rank, world_size=ranks.world_size)
    plan = None
    with together(ranks):
        if ranks is None:
            placement = _place(model, records, rule, options)
        else:
            placement, plan = _place_beside(model, records, rule, options)
    state = _open_state(stack, placement, rule, options, ranks)
    with together(ranks):
        activations = activations_for(
            options.share, options.budget.host_bytes, options.directories, state.timeline
        )
        stack.callback(activations.close)
    sharing = _sharing(stack, records, state, plan, options, ranks)
    offloaded = OffloadedModel(
        model,
        records,
        state,
        rule=rule,
        budget=options.budget,
        activations=activations,
        max_grad_norm=options.max_grad_norm,
        loss_scale=LossScale() if dtype == torch.float16 else None,
        compute_dtype=dtype,
        checkpoint_bytes=placement.checkpoint_bytes,
        sharing=sharing,
    )
    with together(ranks):
        fill_all(state, records, values, sharing)
    sharing.agree_on_values()
    stack.enter_context(BufferConversion(model, options.device, dtype, values))
    activations.leave_alone(model.buffers())
    offloaded.optimizer = optimizer_for(options.optimizer, inner, records, offloaded)
    offloaded.attach(stack)
    return offloaded


def _place(
    model: nn.Module, records: Sequence[Record], rule: UpdateRule, options: _Options
) -> Placement:
    """The homes of what this process keeps, all of it if there are no other ranks."""
    return _place_within(model, records, rule, options, options.share.rest_of(options.budget))


def _place_beside(
    model: nn.Module, records: Sequence[Record], rule: UpdateRule, options: _Options
) -> tuple[Placement, GatherPlan]:
    """The homes of what this rank keeps, beside the memory for what it gathers."""
    rest = options.share.rest_of(options.budget)
    plans = gather_plans(model, records, options.budget, options.device)
    for plan in plans[:-1]:
        try:
            placed = _place_within(model, records, rule, options, plan.rest_of(rest))
        except BudgetError:
            continue
        return placed, plan
    plan = plans[-1]
    try:
        return _place_within(model, records, rule, options, plan.rest_of(rest)), plan
    except BudgetError as error:
        raise plan.error(error) from error


def _place_within(
    model: nn.Module,
    records: Sequence[Record],
    rule: UpdateRule,
    options: _Options,
    budget: Budget,
) -> Placement:
    least_bytes = least_arena_bytes(model, records)
    check_device_budget(budget, least_bytes)
    try:
        return place(
            [record.spec for record in records],
            rule,
            budget,
            least_arena_bytes=least_bytes,
            separate_device=options.device.type != "cpu",
        )
    except BudgetError as error:
        raise options.share.error(error, options.budget) from error


def parameter_bound(max_parameter_bytes: int | str | None) -> int | None:
    """The argument of ``offload`` in bytes; tiles that count as small parameters, which always
    stay in memory, would defeat their purpose.
    """
    if max_parameter_bytes is None:
        return None
    bound = parse_bytes(max_parameter_bytes, name="max_parameter_bytes")
    if bound < MIN_TILE_BYTES:
        raise ValueError(
            f"max_parameter_bytes={bound} is less than {MIN_TILE_BYTES}: parameters of up to "
            f"{RESIDENT_ELEMENTS} elements always stay in memory, smaller tiles would as well"
        )
    return bound


def make_budget(
    host_memory: int | str | None,
    device_memory: int | str | None,
    device: torch.device | None = None,
) -> Budget:
    """The budget that the arguments of ``offload`` mean; half of the memory that is free by
    default.
    """
    if host_memory is None:
        host_memory = psutil.virtual_memory().available // 2
    device_bytes = None
    if device_memory is not None:
        device_bytes = parse_bytes(device_memory, name="device_memory")
    elif device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        device_bytes = int(free * _DEVICE_SHARE)
    return Budget(
        host_bytes=parse_bytes(host_memory, name="host_memory"), device_bytes=device_bytes
    )


def check_device_budget(budget: Budget, least_bytes: int) -> None:
    """Raises ``BudgetError`` if weights that are at work at once do not fit ``device_memory``."""
    if budget.device_bytes is not None and budget.device_bytes < least_bytes:
        raise BudgetError(
            f"device_memory={format_bytes(budget.device_bytes)} is too small: the largest block of "
            f"this model computes from {format_bytes(least_bytes)} ({least_bytes} bytes) of weights"
        )


def directories_of(nvme: Directories) -> list[str]:
    """The directories as absolute paths, each one usable.

    Raises ``TypeError``, ``ValueError`` or ``OSError`` (missing, no directory, not writable).
    """
    entries = [nvme] if isinstance(nvme, (str, os.PathLike)) else nvme
    if not isinstance(entries, Sequence):
        raise TypeError(f"nvme={nvme!r} is neither a path nor a sequence of paths")
    directories = [str(Path(entry).absolute()) for entry in entries]
    if not directories:
        raise ValueError("nvme is empty; give a directory, or one for each SSD")
    if len({os.path.realpath(entry) for entry in directories}) < len(directories):
        raise ValueError(f"nvme={directories} names a directory twice; give each SSD once")
    for directory in directories:
        check_usable(Path(directory))
    return directories


def _checked_norm(max_grad_norm: float | None) -> float | None:
    if max_grad_norm is None:
        return None
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
        raise TypeError(f"max_grad_norm={max_grad_norm!r} is neither a number nor None")
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be more than 0")
    return max_grad_norm


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; use 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this torch sees no CUDA device")
    return chosen


def _open_state(
    stack: ExitStack, placement: Placement, rule: UpdateRule, options: _Options, ranks: Ranks | None
) -> TieredState:
    bandwidths = shares(options.directories)
    if ranks is not None:
        bandwidths = shared_shares(ranks, options.directories, bandwidths)
    with together(ranks):
        state = TieredState(
            placement,
            rule,
            options.directories,
            shares=bandwidths,
            device=options.device,
            device_bytes=options.budget.device_bytes,
            overlap=options.overlap,
        )
        stack.callback(state.close)
    return state


def _sharing(
    stack: ExitStack,
    records: Sequence[Record],
    state: TieredState,
    plan: GatherPlan | None,
    options: _Options,
    ranks: Ranks | None,
) -> Sharing:
    if ranks is None or plan is None:
        return Unshared(state)
    capacity = min(ranks.coordinator.exchange(plan.capacity_bytes))
    memory = GatherMemory(plan.nbytes, options.device)
    stack.callback(memory.close)
    return OverRanks(
        ranks, records, state, memory, capacity_bytes=capacity, prefetch=options.overlap
    )
