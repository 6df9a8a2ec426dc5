"""Which budget of host memory leaves which part of the state on NVMe; asks ``infinity.plan``."""

from __future__ import annotations

from gpt import GPT

import infinity
from gpu_bench.jobs import Job

_STEPS = 12
"""Halvings of the range of budgets."""
_MOST_BYTES = 24
"""A parameter, with all that any budget is good for."""


def plan_of(job: Job, host_memory: int, model: GPT | None = None) -> infinity.Plan:
    """Where the bytes of a job would live; ``model`` is its own."""
    return infinity.plan(
        job.skeleton() if model is None else model,
        host_memory=host_memory,
        device_memory=job.device_memory,
        device=job.device,
        compute_dtype=job.torch_dtype,
    )


def host_memory_for(job: Job, part_on_nvme: float, most: int) -> int:
    """The least budget with no more than that part of the state on NVMe.

    Raises ``ValueError`` if ``most`` bytes are too little for that.
    """

    model = job.skeleton()

    def part(budget: int) -> float:
        by_tier = plan_of(job, budget, model).bytes_by_tier
        return by_tier["nvme"] / sum(by_tier.values())

    if part(most) > part_on_nvme:
        raise ValueError(
            f"{most} bytes of host memory leave {part(most):.0%} of the state on NVMe, where "
            f"{part_on_nvme:.0%} is to be; free some of it, or train less"
        )
    low = plan_of(job, 1, model).least_host_bytes
    high = min(most, low + _MOST_BYTES * sum(p.numel() for p in model.parameters()))
    if part(high) > part_on_nvme:
        high = most
    for _ in range(_STEPS):
        middle = (low + high) // 2
        low, high = (low, middle) if part(middle) <= part_on_nvme else (middle, high)
    return high
