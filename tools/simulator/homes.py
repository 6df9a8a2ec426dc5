"""Where the bytes of a trace live on one rank: the partition, the placement and the plan for
gathering that ``offload`` makes, by the same pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from infinity.parameters.partition import Share, partition
from infinity.ranks.gather_plan import GatherPlan, plans_for
from simulator.trace import Trace
from swap.plan.layout import PIECE
from swap.plan.placement import Placement, place
from swap.plan.rules import AdamRule, UpdateRule
from swap.tiers import Budget, BudgetError, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """``placement`` of rank 0's slices, which are the longest, and what it gathers with."""

    placement: Placement
    rule: UpdateRule
    is_partitioned: tuple[bool, ...]
    world_size: int
    capacity_bytes: int
    arena_bytes: int


def homes_of(
    trace: Trace,
    budget: Budget,
    *,
    world_size: int = 1,
    on_host: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Homes:
    """Raises ``BudgetError`` with the least host budget that works if ``budget`` is below it."""
    rule = AdamRule(state_dtype=state_dtype)
    shares = [
        Share(
            numel=spec.numel,
            bytes_per_element=spec.dtype.itemsize + (12 if spec.trainable else 0),
            row=row,
            resident=spec.resident,
        )
        for spec, row in zip(trace.specs, trace.rows, strict=True)
    ]
    cuts = partition(shares, world_size)
    specs = [
        replace(spec, numel=max(cut.lengths) if cut.offsets else spec.numel)
        for spec, cut in zip(trace.specs, cuts, strict=True)
    ]
    cut_bytes = [
        spec.padded_numel * spec.dtype.itemsize
        for spec, cut in zip(trace.specs, cuts, strict=True)
        if not cut.is_replicated
    ]
    plan = GatherPlan(0, 0, on_host)
    if world_size > 1:
        plan = _gather_plan(cut_bytes, trace.block_bytes, budget, on_host)
    rest = plan.rest_of(budget)
    # The slices of a block: each may be a piece more than its part.
    block = -(-trace.block_bytes // world_size) + (16 * PIECE if world_size > 1 else 0)
    try:
        placement = place(specs, rule, rest, least_arena_bytes=block, separate_device=not on_host)
    except BudgetError as error:
        beside = plan.nbytes if on_host else 0
        least = error.least_host_bytes + beside
        raise BudgetError(
            f"{error}, beside {format_bytes(beside)} for gathering", least_host_bytes=least
        ) from error
    if rest.device_bytes is not None and rest.device_bytes < block:
        raise BudgetError(
            f"device_memory={format_bytes(rest.device_bytes)} is too small for the largest block, "
            f"{format_bytes(block)}"
        )
    device_bytes = placement.arena_bytes if on_host else rest.device_bytes
    assert device_bytes is not None
    return Homes(
        placement=placement,
        rule=rule,
        is_partitioned=tuple(not cut.is_replicated for cut in cuts),
        world_size=world_size,
        capacity_bytes=plan.capacity_bytes,
        arena_bytes=device_bytes,
    )


def _gather_plan(sizes: list[int], block_bytes: int, budget: Budget, on_host: bool) -> GatherPlan:
    """The most generous plan that leaves something for all the rest."""
    plans = plans_for(sizes, block_bytes, budget, on_host=on_host)
    whole = budget.host_bytes if on_host else budget.device_bytes or 0
    return next((plan for plan in plans if 2 * plan.nbytes <= whole), plans[-1])
