"""``infinity.plan``: where every byte would live, and what a step would cost, before anything
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from aio.errors import check_flag
from infinity.activations.tiers import ActivationShare, mode_of
from infinity.arguments import (
    Directories,
    device_of,
    directories_of,
    make_budget,
    named_device,
    parameter_bound,
)
from infinity.optim.adamw import AdamW
from infinity.optim.chosen import rule_for
from infinity.optim.optimizer import OptimizerFactory
from infinity.optim.rule import NativeOptimizer
from infinity.parameters.records import records_of
from infinity.planning.placing import (
    Demand,
    Placed,
    demand_of,
    expects_steps,
    least_device_bytes,
    least_host_bytes,
    place_within,
)
from infinity.planning.typical import typical_model
from infinity.tiling.layers import Tiling
from swap.interruptions.undo import Undo
from swap.plan.placement import Placement
from swap.plan.traffic import traffic_of
from swap.storage.drives.bandwidth import Bandwidth, measure
from swap.storage.drives.endurance import DRIVE_ENDURANCE, Wear, endurance_of
from swap.tiers import Budget, BudgetError, check_count, format_bytes, parse_amount

_DEFAULT_OPTIMIZER = AdamW()
_MOST_RANKS = 1 << 16
"""A cut knows where each rank's slice begins: with many more the plan would take gigabytes."""
_MOST_PASSES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What ``offload`` would do with these budgets; for one rank. Bytes, seconds and steps in the
    names.

    ``fits`` is False when the budget is below ``least_host_bytes``, or ``device_memory`` below
    ``least_device_bytes``; the other figures are then those of the least budgets.
    ``io_seconds_per_step`` takes the measured bandwidth of the directories and is None without any.
    ``bytes_by_tier`` counts homes: state and gradients. Swap files take ``nvme_bytes`` from the
    beginning, and up to ``nvme_wanted_bytes`` where the disks have that much: with less, what the
    backward pass would update speculatively waits for the step. Each snapshot that is kept takes up
    to ``snapshot_bytes`` besides. ``endurance_bytes`` is what all drives together are rated for.
    ``passes`` are backward passes; 0 where there is no optimizer, and what is said of a step is of
    a forward pass.
    """

    num_parameters: int
    world_size: int
    budget_host_bytes: int
    least_host_bytes: int
    fits: bool
    host_bytes: int
    least_device_bytes: int
    nvme_bytes: int
    nvme_wanted_bytes: int
    snapshot_bytes: int
    passes: int
    bytes_by_tier: Mapping[str, int]
    read_bytes_per_step: int
    written_bytes_per_step: int
    read_bandwidth: float | None
    write_bandwidth: float | None
    compute_seconds: float | None
    endurance_bytes: int

    @property
    def seconds_per_step(self) -> float | None:
        """The longer of computing and I/O, as far as they are known; I/O alone is the least."""
        known = [s for s in (self.io_seconds_per_step, self.compute_seconds) if s is not None]
        return max(known, default=None)

    @property
    def wear(self) -> Wear:
        """What such steps do to the drives."""
        return Wear(
            written_bytes_per_step=self.written_bytes_per_step,
            seconds_per_step=self.seconds_per_step,
            endurance_bytes=self.endurance_bytes,
        )

    @property
    def io_seconds_per_step(self) -> float | None:
        """Seconds that a step's traffic takes at the measured bandwidth, reads and writes sharing
        the SSDs.
        """
        if not self.read_bandwidth or not self.write_bandwidth:
            return None
        return (
            self.read_bytes_per_step / self.read_bandwidth
            + self.written_bytes_per_step / self.write_bandwidth
        )

    def steps_within(self, endurance_bytes: float) -> float:
        """Steps until ``endurance_bytes`` (a drive's rated TBW) are written; maybe infinite."""
        written = self.written_bytes_per_step
        return endurance_bytes / written if written else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings, for ``json.dumps``; what is not known is None."""
        known: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return known | {
            "bytes_by_tier": dict(self.bytes_by_tier),
            "io_seconds_per_step": self.io_seconds_per_step,
            "written_bytes_per_day": self.wear.written_bytes_per_day,
        }

    def __str__(self) -> str:
        seconds = self.io_seconds_per_step
        unit = "step" if self.passes else "pass"
        rows = [
            ("parameters", f"{self.num_parameters:,} on {self.world_size} rank(s)"),
            ("host_memory", format_bytes(self.budget_host_bytes)),
            ("least host_memory that works", format_bytes(self.least_host_bytes)),
            ("least device_memory that works", format_bytes(self.least_device_bytes)),
            ("fits", "yes" if self.fits else "no; figures below are for the least budget"),
            ("host memory taken", format_bytes(self.host_bytes)),
            ("space on NVMe, at least", format_bytes(self.nvme_bytes)),
            ("space on NVMe, wanted", format_bytes(self.nvme_wanted_bytes)),
            ("and for each snapshot, at most", format_bytes(self.snapshot_bytes)),
            *((f"home in {name}", format_bytes(n)) for name, n in self.bytes_by_tier.items()),
            *([("backward passes per step", f"{self.passes}")] if self.passes else []),
            (f"read per {unit}", format_bytes(self.read_bytes_per_step)),
            (f"written per {unit}", format_bytes(self.written_bytes_per_step)),
            (f"I/O per {unit}", "not measured" if seconds is None else f"{seconds:.2f} s"),
            *(self.wear.rows() if self.passes else []),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan(
    model_or_num_parameters: nn.Module | int,
    nvme: Directories | None = None,
    host_memory: int | str | None = None,
    device_memory: int | str | None = None,
    world_size: int = 1,
    *,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
    optimizer: NativeOptimizer | OptimizerFactory | None = _DEFAULT_OPTIMIZER,
    activations: str = "keep",
    max_parameter_bytes: int | str | None = None,
    verify_swap: bool = False,
    passes: int = 1,
    compute_seconds: float | None = None,
    drive_endurance: int | str = DRIVE_ENDURANCE,
) -> Plan:
    """Where every byte would live, the least budget that works, and the traffic of a step. Changes
    nothing.

    A number of parameters stands for a transformer of that size, see ``planning.typical``; models
    with larger vocabularies or wider layers need more, so pass the model itself where there is one
    (it may be on the meta device). With a ``world_size`` everything but ``num_parameters`` is of
    the rank that keeps the most, as is ``host_memory``. ``nvme`` are its directories, measured with
    a short read and write. ``device``, ``compute_dtype``, ``optimizer``, ``activations``,
    ``max_parameter_bytes`` and ``verify_swap`` are as for ``offload``, but that a GPU need not be
    in this machine; the traffic of activations, which depends on the batch, is not in the figures.
    ``passes``: backward passes that are accumulated before a step. With ``optimizer=None`` there is
    none, the figures are of a forward pass, and a number stands for a model that needs no
    gradients (give such a model, too: those of others take room). ``compute_seconds`` is what a
    step computes, if you know it: without, bytes written per day are those of steps that do nothing
    but I/O, the most that there can be. ``drive_endurance``: bytes that the drive of each directory
    is rated for (its TBW). Raises ``ValueError`` or ``TypeError`` for arguments that are out of
    range, and what ``offload`` raises for a model that cannot be offloaded.
    """
    check_count(world_size, name="world_size", most=_MOST_RANKS)
    check_count(passes, name="passes", most=_MOST_PASSES)
    check_flag("verify_swap", verify_swap)
    if compute_seconds is not None:
        compute_seconds = parse_amount(compute_seconds, name="compute_seconds")
    nvme_here = [] if nvme is None else directories_of(nvme)
    share = ActivationShare(
        mode=mode_of(activations),
        device=_planned_device(device),
        num_directories=max(1, len(nvme_here)),
    )
    demand, num_parameters = _demand(
        model_or_num_parameters,
        compute_dtype,
        optimizer,
        parameter_bound(max_parameter_bytes),
        world_size,
        share,
        verifies=verify_swap,
    )
    budget = make_budget(host_memory, device_memory, share.device)
    placed, fits = _placed(demand, budget)
    found = _summary(demand, placed, budget, passes, None if nvme is None else measure(nvme_here))
    return replace(
        found,
        num_parameters=num_parameters,
        world_size=world_size,
        fits=fits,
        compute_seconds=compute_seconds,
        endurance_bytes=endurance_of(drive_endurance, share.num_directories),
    )


def _summary(
    demand: Demand, placed: Placed, budget: Budget, passes: int, bandwidth: Bandwidth | None
) -> Plan:
    placement = placed.placement
    passes = passes if demand.rule.takes_steps else 0
    traffic = traffic_of(placement, backward_passes=passes)
    return Plan(
        num_parameters=sum(spec.numel for spec in demand.specs),
        world_size=1,
        budget_host_bytes=budget.host_bytes,
        least_host_bytes=placed.least_host_bytes,
        least_device_bytes=placed.least_device_bytes,
        fits=True,
        host_bytes=placed.host_bytes,
        nvme_bytes=placement.nvme_bytes,
        nvme_wanted_bytes=placement.nvme_wanted_bytes,
        snapshot_bytes=placement.rewritten_nvme_bytes
        + placement.state_host_bytes
        + placement.state_device_bytes,
        passes=passes,
        bytes_by_tier={
            **_on_device(placement),
            "host": placement.state_host_bytes + placement.gradient_host_bytes,
            "nvme": placement.state_nvme_bytes + placement.gradient_nvme_bytes,
        },
        read_bytes_per_step=traffic.read,
        written_bytes_per_step=traffic.written,
        read_bandwidth=None if bandwidth is None else bandwidth.read,
        write_bandwidth=None if bandwidth is None else bandwidth.write,
        compute_seconds=None,
        endurance_bytes=0,
    )


def _on_device(placement: Placement) -> dict[str, int]:
    """What is at home on a device with memory of its own, if there is one."""
    at_home = placement.state_device_bytes + placement.gradient_device_bytes
    return {"device": at_home} if placement.device_bytes else {}


def _planned_device(device: torch.device | str | None) -> torch.device:
    """As ``offload`` takes it; one that is named may be missing here."""
    return device_of(None) if device is None else named_device(device)


def _demand(
    model: nn.Module | int,
    compute_dtype: torch.dtype | None,
    optimizer: NativeOptimizer | OptimizerFactory | None,
    bound: int | None,
    world_size: int,
    share: ActivationShare,
    *,
    verifies: bool,
) -> tuple[Demand, int]:
    """What the rank asks for that keeps the most, and the number of parameters of all of them."""
    if isinstance(model, bool) or not isinstance(model, nn.Module | int):
        given: object = model
        is_count = isinstance(given, float) and given.is_integer()
        remedy = (
            f"write {int(model)}" if is_count else "pass the model, or a count such as 7 * 10**9"
        )
        raise TypeError(
            f"{model!r} is neither an nn.Module nor a whole number of parameters; {remedy}"
        )
    with Undo() as undo:  # which ends what an interrupt kept from beginning, too
        whole: nn.Module = typical_model(model) if isinstance(model, int) else model
        if isinstance(model, int):
            compute_dtype = compute_dtype or torch.bfloat16
            whole.requires_grad_(optimizer is not None)
        records = records_of(whole, compute_dtype)
        if bound is not None:
            undo.enter_context(Tiling(whole, records, bound, compute_dtype))
        records = records_of(whole, compute_dtype, world_size=world_size)
        rule, _ = rule_for(optimizer, records)
        demand = demand_of(
            whole,
            records,
            rule,
            share,
            is_partitioned=world_size > 1,
            verifies=verifies,
            speculates=expects_steps(rule, compute_dtype),
        )
        # Not what rank 0 keeps, but what a rank keeps that has as much of each as any.
        return replace(demand, specs=demand.longest), sum(record.numel for record in records)


def _placed(demand: Demand, budget: Budget) -> tuple[Placed, bool]:
    """The homes within ``budget``, or within the least that works; and whether that is enough."""
    try:
        return place_within(demand, budget), True
    except BudgetError:
        least = Budget(
            host_bytes=max(budget.host_bytes, least_host_bytes(demand)),
            device_bytes=budget.device_bytes
            and max(budget.device_bytes, least_device_bytes(demand)),
        )
        return place_within(demand, least), False
