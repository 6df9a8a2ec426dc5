"""Where the bytes of a model live under a budget, for one rank: the one decision that ``plan``
shows and ``offload`` carries out. Pure: no I/O, no memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.activations.tiers import ActivationShare
from infinity.optim.rule import OptimizerRule
from infinity.parameters.records import Record, least_arena_bytes, least_gathered_bytes
from infinity.ranks.gather_plan import GatherPlan, plans_for
from swap.device.opening import is_separate
from swap.plan.layout import ParameterSpec, pad
from swap.plan.placement import Placement, place
from swap.plan.rules import UpdateRule
from swap.tiers import Budget, BudgetError, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a rank has to place. ``specs`` are its own slices, ``longest`` those of a rank that
    keeps of each parameter as much as any: all ranks need the budget that these need.

    ``block_bytes`` of slices are at work at once; of partitioned parameters, whole, there are
    ``gathered_sizes`` bytes, ``gathered_bytes`` of them at once. ``verifies``: there are checksums
    of what is on NVMe. ``speculates``: steps may be expected, see ``Training.expect_step``.
    """

    specs: tuple[ParameterSpec, ...]
    longest: tuple[ParameterSpec, ...]
    rule: UpdateRule
    block_bytes: int
    gathered_sizes: tuple[int, ...]
    gathered_bytes: int
    is_partitioned: bool
    share: ActivationShare
    verifies: bool = False
    speculates: bool = False

    @property
    def on_host(self) -> bool:
        """Whether weights are computed with in host memory."""
        return not is_separate(self.share.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The homes, and what stands beside them: ``gathering`` with other ranks, saved tensors.

    ``least_host_bytes`` and ``least_device_bytes`` are the least budgets that work.
    """

    placement: Placement
    gathering: GatherPlan | None
    activation_bytes: int
    least_host_bytes: int
    least_device_bytes: int

    @property
    def gathering_bytes(self) -> int:
        """Host memory for what is gathered and exchanged."""
        return self.gathering.nbytes if self.gathering and self.gathering.on_host else 0

    @property
    def host_bytes(self) -> int:
        """All host memory that the library takes."""
        return self.placement.host_bytes + self.gathering_bytes + self.activation_bytes


def demand_of(
    model: nn.Module,
    records: Sequence[Record],
    rule: UpdateRule,
    share: ActivationShare,
    *,
    is_partitioned: bool,
    verifies: bool = False,
    speculates: bool = False,
) -> Demand:
    """What the rank asks for that keeps ``records`` of ``model``."""
    return Demand(
        specs=tuple(record.spec for record in records),
        longest=tuple(record.longest_spec for record in records),
        rule=rule,
        block_bytes=least_arena_bytes(model, records, on_host=not is_separate(share.device)),
        gathered_sizes=tuple(
            pad(record.numel) * record.spec.dtype.itemsize
            for record in records
            if record.is_partitioned
        ),
        gathered_bytes=least_gathered_bytes(model, records),
        is_partitioned=is_partitioned,
        share=share,
        verifies=verifies,
        speculates=speculates,
    )


def expects_steps(rule: OptimizerRule, compute_dtype: torch.dtype | None) -> bool:
    """Whether updates may begin before their step, which they cannot where one may be computed but
    once, nor where a loss scale decides whether there is one.
    """
    return rule.kept_by is not None and rule.is_repeatable and compute_dtype != torch.float16


def place_within(demand: Demand, budget: Budget) -> Placed:
    """The homes of everything within ``budget``.

    Raises ``BudgetError`` with the least host budget that works, on all ranks the same, or with 0
    for a device budget that cannot work.
    """
    plans = _gather_plans(demand, budget)
    _check_device(demand, plans[-1], budget)
    refusal = _refusal(demand)
    if budget.host_bytes < refusal.least_host_bytes:
        raise BudgetError(
            f"host_memory={format_bytes(budget.host_bytes)} is too small: {refusal}",
            least_host_bytes=refusal.least_host_bytes,
        )
    rest = demand.share.rest_of(budget)
    failures: list[BudgetError] = []
    for plan in plans:
        try:
            _check_device(demand, plan, budget)
            placement = _place(demand.specs, demand, plan.rest_of(rest) if plan else rest)
        except BudgetError as error:
            failures.append(error)
        else:
            return Placed(
                placement=placement,
                gathering=plan,
                activation_bytes=demand.share.bytes_of(budget.host_bytes),
                least_host_bytes=refusal.least_host_bytes,
                least_device_bytes=least_device_bytes(demand),
            )
    raise failures.pop()


def has_room_for_freed_memory(demand: Demand, placed: Placed, budget: Budget) -> bool:
    """Whether the budget has room for all gradients beside what the library takes: the C library's
    heap keeps as much of what backward passes free, unless it is held small.
    """
    if placed.placement.nvme_bytes or demand.share.mode == "nvme":
        return False
    gradient_bytes = sum(spec.weight_bytes for spec in demand.specs if spec.trainable)
    return placed.host_bytes + gradient_bytes <= budget.host_bytes


def least_host_bytes(demand: Demand) -> int:
    """The least host budget that works."""
    return _refusal(demand).least_host_bytes


def least_device_bytes(demand: Demand) -> int:
    """The least device budget that works."""
    return _least_device_bytes(demand, _gather_plans(demand, Budget(host_bytes=0))[-1])


def _least_device_bytes(demand: Demand, plan: GatherPlan | None) -> int:
    beside = plan.nbytes if plan and not plan.on_host else 0
    return demand.block_bytes + beside


def _refusal(demand: Demand) -> BudgetError:
    """What is wrong with a budget of nothing: the least that works, and what it is for."""
    nothing = Budget(host_bytes=0)
    plan = _gather_plans(demand, nothing)[-1]
    gathering = plan.nbytes if plan and plan.on_host else 0
    try:
        _place(demand.longest, demand, nothing)
        raise AssertionError("no host memory at all was enough")
    except BudgetError as error:
        least = demand.share.least_for(error.least_host_bytes + gathering)
        placed = str(error).split(" bytes): ", 1)[1]
    beside = []
    if gathering:
        beside.append(f"{format_bytes(gathering)} for weights and gradients gathered over ranks")
    if activations := demand.share.bytes_of(least):
        mode = demand.share.mode
        beside.append(f"{format_bytes(activations)} for saved tensors (activations={mode!r})")
    if beside:  # what would hold everything is said without these
        placed = placed.rpartition(";")[0]
    return BudgetError(
        f"this model needs at least {format_bytes(least)} ({least} bytes): "
        + "; ".join([*beside, placed]),
        least_host_bytes=least,
    )


def _check_device(demand: Demand, plan: GatherPlan | None, budget: Budget) -> None:
    """Raises ``BudgetError`` if weights that are at work at once do not fit ``device_memory``."""
    if budget.device_bytes is None:
        return
    least = _least_device_bytes(demand, plan)
    if budget.device_bytes < least:
        raise BudgetError(
            f"device_memory={format_bytes(budget.device_bytes)} is too small: the largest block of "
            f"this model computes from {format_bytes(least)} ({least} bytes) of weights"
        )


def _gather_plans(demand: Demand, budget: Budget) -> Sequence[GatherPlan | None]:
    """Ways to gather, the most generous first; None for a process that has everything."""
    if not demand.is_partitioned:
        return [None]
    return plans_for(demand.gathered_sizes, demand.gathered_bytes, budget, on_host=demand.on_host)


def _place(specs: Sequence[ParameterSpec], demand: Demand, budget: Budget) -> Placement:
    return place(
        specs,
        demand.rule,
        budget,
        least_arena_bytes=demand.block_bytes,
        separate_device=not demand.on_host,
        verifies=demand.verifies,
        hides_updates=demand.speculates and not demand.on_host,
    )
