"""How much memory whole weights and gradients on their way take of a rank's budget: pure
arithmetic.

On a CPU it is host memory, on a GPU the device's. Some of it must be there: the largest block at
work, one parameter that comes next, two gradients being exchanged. More keeps weights from forward
to backward. All ranks keep the same number of bytes of weights, the least that any of them can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swap.plan.layout import PIECE
from swap.tiers import Budget

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
        if budget.device_bytes is None:
            return budget
        device_bytes = max(0, budget.device_bytes - self.nbytes)
        return Budget(host_bytes=budget.host_bytes, device_bytes=device_bytes)


def plans_for(
    sizes: Sequence[int], block_bytes: int, budget: Budget, *, on_host: bool
) -> list[GatherPlan]:
    """Ways to gather within ``budget``, the most generous first: partitioned parameters of so many
    bytes each, of which ``block_bytes`` are at work at once.
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
