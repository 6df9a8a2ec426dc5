"""The largest model that a machine has room for. Pure but for what it is given to call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from infinity.planning.plan import Plan
from swap.tiers import format_bytes

CANDIDATES = [digits * 10**power for power in range(5, 11) for digits in range(10, 100)]
"""Numbers of parameters of two digits, from 1 M to 990 G: none knows a machine more exactly."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The plan of the largest model that fits, and what a slightly larger one lacks."""

    plan: Plan
    lacks: str


def largest(planned: Callable[[int], Plan], space_bytes: int | None) -> Largest:
    """Of ``CANDIDATES``, with ``space_bytes`` on NVMe, None for as much as it takes.

    Raises ``ValueError`` if not even the smallest fits.
    """

    def lacks(count: int) -> str:
        return lacking(planned(count), space_bytes)

    found = bisect_left(CANDIDATES, True, key=lambda count: bool(lacks(count)))
    if found == 0:
        raise ValueError(f"not even {CANDIDATES[0]:,} parameters fit: {lacks(CANDIDATES[0])}")
    more = lacks(CANDIDATES[found]) if found < len(CANDIDATES) else "none was tried"
    return Largest(planned(CANDIDATES[found - 1]), more)


def lacking(plan: Plan, space_bytes: int | None) -> str:
    """What a plan has not got; empty if it has everything."""
    missing = []
    if plan.least_host_bytes > plan.budget_host_bytes:
        missing.append(
            f"host_memory of {format_bytes(plan.least_host_bytes)} "
            f"({format_bytes(plan.budget_host_bytes)} given)"
        )
    elif not plan.fits:
        missing.append(f"device_memory of {format_bytes(plan.least_device_bytes)}")
    if space_bytes is not None and plan.nvme_bytes > space_bytes:
        missing.append(
            f"{format_bytes(plan.nvme_bytes)} on NVMe ({format_bytes(space_bytes)} are there)"
        )
    return f"{plan.num_parameters:,} parameters need {' and '.join(missing)}" if missing else ""
