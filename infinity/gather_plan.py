"""How much memory whole weights and gradients on their way take of a rank's budget: pure
arithmetic.

On a CPU it is host memory, on a GPU the device's. Some of it must be there: the largest block at
work, one parameter that comes next, two gradients being exchanged. More keeps weights from forward
to backward. All ranks keep the same number of bytes of weights, the least that any of them can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.discovery import Record, least_gathered_bytes
from swap.layout import PIECE, pad
from swap.tiers import Budget, BudgetError, format_bytes

_SHARE = 4
"""Ranks keep whole weights in one part of so many of what their budgets leave."""
_EXCHANGES = 2


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """``capacity_bytes`` of weights that are kept, ``reserve_bytes`` for gradients and for what
    lies between ranges in use.
    """

    capacity_bytes: int
    reserve_bytes: int
    on_host: bool

    @property
    def nbytes(self) -> int:
        return self.capacity_bytes + self.reserve_bytes

    def rest_of(self, budget: Budget) -> Budget:
        """The budget for everything else."""
        if self.on_host:
            host_bytes = max(0, budget.host_bytes - self.nbytes)
            return Budget(host_bytes=host_bytes, device_bytes=budget.device_bytes)
        assert budget.device_bytes is not None
        device_bytes = max(0, budget.device_bytes - self.nbytes)
        return Budget(host_bytes=budget.host_bytes, device_bytes=device_bytes)

    def error(self, of_rest: BudgetError) -> BudgetError:
        """What an error of the rest means for all."""
        if not self.on_host or not of_rest.least_host_bytes:
            return of_rest
        least = of_rest.least_host_bytes + self.nbytes
        return BudgetError(
            f"host_memory is too small: this rank needs at least {format_bytes(least)} ({least} "
            f"bytes): {format_bytes(self.nbytes)} for weights and gradients that are gathered from "
            f"and sent to other ranks, {format_bytes(of_rest.least_host_bytes)} for everything "
            "else",
            least_host_bytes=least,
        )


def gather_plans(
    model: nn.Module, records: Sequence[Record], budget: Budget, device: torch.device
) -> list[GatherPlan]:
    """Ways to gather within ``budget``, the most generous first."""
    sizes = [pad(r.numel) * r.spec.dtype.itemsize for r in records if r.is_partitioned]
    block_bytes = least_gathered_bytes(model, records)
    return plans_for(sizes, block_bytes, budget, on_host=device.type == "cpu")


def plans_for(
    sizes: Sequence[int], block_bytes: int, budget: Budget, *, on_host: bool
) -> list[GatherPlan]:
    """As ``gather_plans``, for partitioned parameters of so many bytes each, of which
    ``block_bytes`` are at work at once.
    """
    if not sizes:
        return [GatherPlan(0, PIECE, on_host)]
    least = block_bytes + max(sizes)
    # A range that is received has a slice of each rank, of up to a unit more than its part.
    exchanged = _EXCHANGES * (max(sizes) + max(sizes) // 8)
    whole = budget.host_bytes if on_host else budget.device_bytes or 0
    ample = max(least, min(sum(sizes), whole // _SHARE))
    return [
        GatherPlan(kept, exchanged + kept // 8 // PIECE * PIECE, on_host)
        for kept in dict.fromkeys((ample, least))
    ]
