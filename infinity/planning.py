"""``infinity.plan``: where every byte would live, and what a step would cost, before anything
starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from infinity.activation_tiers import ActivationShare, mode_of
from infinity.arguments import Directories, directories_of, make_budget, parameter_bound
from infinity.bandwidth import Bandwidth, measure
from infinity.discovery import least_arena_bytes, least_gathered_bytes, records_of
from infinity.endurance import DRIVE_ENDURANCE, Wear, endurance_of
from infinity.gather_plan import plans_for
from infinity.optimizer import AdamW
from infinity.partition import Cut, Share, partition
from infinity.tiling import Tiling
from swap.layout import ParameterSpec, pad
from swap.placement import Placement, place
from swap.rules import AdamRule
from swap.tiers import Budget, BudgetError, format_bytes

_TYPICAL_MATRIX = 4096 * 4096
_BLOCK = 13
"""Matrices of a block, and one that comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What ``offload`` would do with these budgets; for one rank. Bytes, seconds and steps in the
    names.

    ``fits`` is False when the budget is below ``least_host_bytes``; the other figures are then
    those of that least budget. ``io_seconds_per_step`` takes the measured bandwidth of the
    directories and is None without any. ``bytes_by_tier`` counts homes: state and gradients.
    ``endurance_bytes`` is what all drives together are rated for.
    """

    num_parameters: int
    world_size: int
    budget_host_bytes: int
    least_host_bytes: int
    fits: bool
    host_bytes: int
    nvme_bytes: int
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

    def __str__(self) -> str:
        seconds = self.io_seconds_per_step
        rows = [
            ("parameters", f"{self.num_parameters:,} on {self.world_size} rank(s)"),
            ("host_memory", format_bytes(self.budget_host_bytes)),
            ("least host_memory that works", format_bytes(self.least_host_bytes)),
            ("fits", "yes" if self.fits else "no; figures below are for the least budget"),
            ("host memory taken", format_bytes(self.host_bytes)),
            ("space taken on NVMe", format_bytes(self.nvme_bytes)),
            *((f"home in {name}", format_bytes(n)) for name, n in self.bytes_by_tier.items()),
            ("read per step", format_bytes(self.read_bytes_per_step)),
            ("written per step", format_bytes(self.written_bytes_per_step)),
            ("I/O per step", "not measured" if seconds is None else f"{seconds:.2f} s"),
            *self.wear.rows(),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a rank keeps: its slices, those of the block at work, and that block whole."""

    specs: tuple[ParameterSpec, ...]
    cuts: tuple[Cut, ...]
    block_bytes: int
    gathered_bytes: int
    world_size: int

    @property
    def gathered_sizes(self) -> list[int]:
        return [
            pad(cut.numel) * spec.dtype.itemsize
            for spec, cut in zip(self.specs, self.cuts, strict=True)
            if not cut.is_replicated
        ]

    def least_gathering_bytes(self, device: torch.device) -> int:
        """Host memory that gathering takes at the least."""
        if self.world_size == 1 or device.type != "cpu":
            return 0
        none = Budget(host_bytes=0, device_bytes=None)
        return plans_for(self.gathered_sizes, self.gathered_bytes, none, on_host=True)[-1].nbytes


def plan(
    model_or_num_parameters: nn.Module | int,
    nvme: Directories | None = None,
    host_memory: int | str | None = None,
    device_memory: int | str | None = None,
    world_size: int = 1,
    *,
    compute_dtype: torch.dtype | None = None,
    optimizer: AdamW | None = None,
    activations: str = "keep",
    max_parameter_bytes: int | str | None = None,
    compute_seconds: float | None = None,
    drive_endurance: int | str = DRIVE_ENDURANCE,
) -> Plan:
    """Where every byte would live, the least budget that works, and the traffic of a step. Changes
    nothing.

    A number of parameters stands for a transformer in bfloat16 made of 4096 x 4096 matrices. With a
    ``world_size`` everything but ``num_parameters`` is of the rank that keeps the most, as is
    ``host_memory``. ``nvme`` are its directories, measured with a short read and write.
    ``compute_dtype``, ``optimizer``, ``activations`` and ``max_parameter_bytes`` are as for
    ``offload``; the traffic of activations, which depends on the batch, is not in the
    figures. ``compute_seconds`` is what a step computes, if you know it: without, bytes written per
    day are those of steps that do nothing but I/O, the most that there can be.
    ``drive_endurance``: bytes that the drive of each directory is rated for (its TBW). Raises
    ``ValueError`` for arguments that are out of range.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be 1 or more")
    bound = parameter_bound(max_parameter_bytes)
    parts = _parts(model_or_num_parameters, compute_dtype, bound, world_size)
    rule = AdamRule(state_dtype=(optimizer or AdamW()).state_dtype)
    budget = make_budget(host_memory, device_memory)
    num_directories = 1 if nvme is None else len(directories_of(nvme))
    share = ActivationShare(
        mode=mode_of(activations),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        num_directories=num_directories,
    )
    fits, rest = True, share.rest_of(budget)
    try:
        placement, gathering = _place(parts, rule, rest, share.device)
    except BudgetError as error:
        fits = False
        least = Budget(host_bytes=error.least_host_bytes, device_bytes=budget.device_bytes)
        placement, gathering = _place(parts, rule, least, share.device)
    bandwidth = None if nvme is None else measure(directories_of(nvme))
    found = _summary(parts, placement, gathering, budget, share, fits, bandwidth)
    return replace(
        found,
        compute_seconds=compute_seconds,
        endurance_bytes=endurance_of(drive_endurance, num_directories),
    )


def _parts(
    model: nn.Module | int, compute_dtype: torch.dtype | None, bound: int | None, world_size: int
) -> _Parts:
    if isinstance(model, nn.Module):
        if bound is not None:
            with Tiling(model, records_of(model, compute_dtype), bound, compute_dtype):
                return _parts(model, compute_dtype, None, world_size)
        records = records_of(model, compute_dtype, world_size=world_size)
        return _Parts(
            specs=tuple(_longest(record.spec, record.cut) for record in records),
            cuts=tuple(record.cut for record in records),
            block_bytes=least_arena_bytes(model, records),
            gathered_bytes=least_gathered_bytes(model, records),
            world_size=world_size,
        )
    if model < 1:
        raise ValueError(f"number of parameters {model} must be 1 or more")
    return _typical(model, compute_dtype or torch.bfloat16, bound, world_size)


def _typical(num_parameters: int, dtype: torch.dtype, bound: int | None, world_size: int) -> _Parts:
    """Square matrices; a block of a transformer has twelve of them."""
    matrix = min(_TYPICAL_MATRIX, (bound or _TYPICAL_MATRIX * dtype.itemsize) // dtype.itemsize)
    sizes = [matrix] * (num_parameters // matrix)
    sizes += [num_parameters % matrix] if num_parameters % matrix else []
    row = math.isqrt(matrix)
    shares = [
        Share(numel=numel, bytes_per_element=dtype.itemsize + 12, row=row, resident=False)
        for numel in sizes
    ]
    cuts = partition(shares, world_size)
    specs = [
        _longest(
            ParameterSpec(
                index=i, name=f"matrix {i}", numel=cut.numel, dtype=dtype, trainable=True
            ),
            cut,
        )
        for i, cut in enumerate(cuts)
    ]
    return _Parts(
        specs=tuple(specs),
        cuts=tuple(cuts),
        block_bytes=_BLOCK * max(spec.padded_numel for spec in specs) * dtype.itemsize,
        gathered_bytes=_BLOCK * max(sizes) * dtype.itemsize,
        world_size=world_size,
    )


def _longest(spec: ParameterSpec, cut: Cut) -> ParameterSpec:
    """What the rank keeps that has the longest slice."""
    return spec if cut.is_replicated else replace(spec, numel=max(cut.lengths))


def _place(
    parts: _Parts, rule: AdamRule, budget: Budget, device: torch.device
) -> tuple[Placement, int]:
    """The homes of what a rank keeps, and the host memory that it gathers with beside them."""
    if parts.world_size == 1:
        return place(parts.specs, rule, budget, least_arena_bytes=parts.block_bytes), 0
    on_host = device.type == "cpu"
    plans = plans_for(parts.gathered_sizes, parts.gathered_bytes, budget, on_host=on_host)
    for plan in plans:
        try:
            placement = place(
                parts.specs, rule, plan.rest_of(budget), least_arena_bytes=parts.block_bytes
            )
        except BudgetError as error:
            failure = plan.error(error)
        else:
            return placement, plan.nbytes if on_host else 0
    raise failure


def _summary(
    parts: _Parts,
    placement: Placement,
    gathering: int,
    budget: Budget,
    share: ActivationShare,
    fits: bool,
    bandwidth: Bandwidth | None,
) -> Plan:
    read, written = placement.traffic_per_step()
    least = share.least_for(placement.least_host_bytes + parts.least_gathering_bytes(share.device))
    return Plan(
        num_parameters=sum(cut.numel for cut in parts.cuts),
        world_size=parts.world_size,
        budget_host_bytes=budget.host_bytes,
        least_host_bytes=least,
        fits=fits,
        host_bytes=placement.host_bytes
        + gathering
        + share.bytes_of(budget.host_bytes if fits else least),
        nvme_bytes=placement.nvme_bytes,
        bytes_by_tier={
            "host": placement.state_host_bytes + placement.gradient_host_bytes,
            "nvme": placement.state_nvme_bytes + placement.gradient_nvme_bytes,
        },
        read_bytes_per_step=read,
        written_bytes_per_step=written,
        read_bandwidth=None if bandwidth is None else bandwidth.read,
        write_bandwidth=None if bandwidth is None else bandwidth.write,
        compute_seconds=None,
        endurance_bytes=0,
    )
