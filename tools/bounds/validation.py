"""Bounds beside measurements: every offloaded run of a result of ``bench_offload.py``.

What the bounds are made of was measured apart from the runs: the seconds of plain forward and
backward passes in memory, the AdamW kernel and the storing of gradients alone, plain requests to
the disk. The bytes are those of ``infinity.plan``. Nothing is fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpt import GPT

import infinity
from bounds.formulas import StepBounds, disk_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One budget of one result; medians of its rounds."""

    name: str
    budget: str
    measured_seconds: float
    measured_read_bytes: float
    measured_written_bytes: float
    planned_read_bytes: int
    planned_written_bytes: int
    step: StepBounds

    @property
    def error(self) -> float:
        """By which part of the measured time the lower bound is too long; negative: too short."""
        return self.step.least_seconds / self.measured_seconds - 1


def comparisons(name: str, result: Mapping[str, Any]) -> list[Comparison]:
    """One for each budget in ``result``.

    Raises ``ValueError`` if the result is not from a CPU: nothing was measured of a GPU's links.
    """
    rounds, options = result["rounds"], result["options"]
    if options["device"] != "cpu" or "host" not in rounds[0]:
        raise ValueError(f"{name} has no rates of a host; run bench_offload.py on a CPU again")
    with torch.device("meta"):
        model = GPT(**{key: options[key] for key in ("width", "depth", "vocabulary", "tokens")})
    dtype = getattr(torch, options["dtype"])
    return [
        _compare(name, rounds, system, model, dtype)
        for system in rounds[0]["samples"]
        if system.startswith("ours:")
    ]


def _compare(
    name: str, rounds: Sequence[Mapping[str, Any]], system: str, model: GPT, dtype: torch.dtype
) -> Comparison:
    budget = system.split(":")[1]
    plan = infinity.plan(model, host_memory=budget, device="cpu", compute_dtype=dtype)
    read, written = plan.read_bytes_per_step, plan.written_bytes_per_step
    return Comparison(
        name=name,
        budget=budget,
        measured_seconds=_median(rounds, "samples", system, "step_seconds"),
        measured_read_bytes=_median(rounds, "samples", system, "read_bytes"),
        measured_written_bytes=_median(rounds, "samples", system, "written_bytes"),
        planned_read_bytes=read,
        planned_written_bytes=written,
        step=_bounds(rounds, plan.num_parameters, dtype.itemsize, read, written),
    )


def _bounds(
    rounds: Sequence[Mapping[str, Any]],
    num_parameters: int,
    itemsize: int,
    read: int,
    written: int,
) -> StepBounds:
    """Everything but the disk takes turns on the cores of the host, which also move the bytes."""
    plain = ("samples", "plain", "phase_seconds")
    computing = sum(_median(rounds, *plain, phase) for phase in ("forward", "backward"))
    update = num_parameters / _median(rounds, "host", "adam")
    storing = num_parameters * itemsize / _median(rounds, "host", "gradients")
    moving = (read + written) / _median(rounds, "bandwidth", "host")
    disks, together = disk_seconds(
        read,
        written,
        ssd_read=_median(rounds, "bandwidth", "read"),
        ssd_write=_median(rounds, "bandwidth", "write"),
        ssd_together=_median(rounds, "bandwidth", "both"),
    )
    cores = {"the host's cores": computing + update + storing + moving}
    return StepBounds(seconds={**cores, **disks}, together_seconds=together)


def _median(rounds: Sequence[Mapping[str, Any]], *keys: str) -> float:
    """The median over rounds of what lies at ``keys``; of a list its mean is taken first."""
    found = []
    for entry in rounds:
        value: Any = entry
        for key in keys:
            value = value[key]
        found.append(statistics.mean(value) if isinstance(value, list) else value)
    return float(statistics.median(found))
