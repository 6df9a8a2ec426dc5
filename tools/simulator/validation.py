"""Predictions beside measurements: every offloaded run of a result of ``bench_offload.py``.

What is predicted from was measured apart from what is predicted: the order and the seconds of a
plain step in memory, the AdamW kernel and the storing of gradients alone, plain requests to the
disk. Nothing is fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.homes import homes_of
from simulator.rates import Rates
from simulator.replay import Pattern, StepTimes, simulate
from simulator.trace import Trace
from swap.tiers import Budget, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One budget of one result. ``bound_seconds``: the larger of computing and I/O, which is what
    a step would take if all of it overlapped.
    """

    name: str
    budget: str
    measured_seconds: float
    measured_read_bytes: float
    measured_written_bytes: float
    bound_seconds: float
    predicted: StepTimes

    @property
    def error(self) -> float:
        """By which part of the measured time the prediction is too long; negative: too short."""
        return self.predicted.step_seconds / self.measured_seconds - 1

    @property
    def bound_error(self) -> float:
        """As ``error``, of the bound."""
        return self.bound_seconds / self.measured_seconds - 1


def predictions(name: str, result: Mapping[str, Any]) -> list[Prediction]:
    """A prediction for each budget in ``result``; medians of its rounds on both sides.

    Raises ``ValueError`` if the result has nothing to predict from: it must come from a CPU.
    """
    rounds = result["rounds"]
    plain = rounds[0]["samples"]["plain"]
    if plain.get("trace") is None or "host" not in rounds[0]:
        raise ValueError(f"{name} has no recorded trace; run bench_offload.py on a CPU again")
    seconds = {
        phase: _median(rounds, "samples", "plain", "phase_seconds", phase)
        for phase in ("forward", "backward")
    }
    trace = Trace.from_json(plain["trace"]).scaled(seconds)
    options = result["options"]
    pattern = Pattern(steps=options["steps"], is_clipped=options["clip"] is not None)
    return [
        _predict(name, rounds, system, trace, pattern)
        for system in rounds[0]["samples"]
        if system.startswith("ours:")
    ]


def rates_of(rounds: Sequence[Mapping[str, Any]]) -> Rates:
    """What was measured beside the runs: medians over the rounds."""
    return Rates(
        ssd_read=_median(rounds, "bandwidth", "read"),
        ssd_write=_median(rounds, "bandwidth", "write"),
        ssd_together=_median(rounds, "bandwidth", "both"),
        ssd_host=_median(rounds, "bandwidth", "host"),
        adam=_median(rounds, "host", "adam"),
        gradients=_median(rounds, "host", "gradients"),
        computes_on_host=True,
    )


def _predict(
    name: str, rounds: Sequence[Mapping[str, Any]], system: str, trace: Trace, pattern: Pattern
) -> Prediction:
    budget = system.split(":")[1]
    rates = rates_of(rounds)
    homes = homes_of(trace, Budget(host_bytes=parse_bytes(budget, name="budget")), on_host=True)
    predicted = simulate(trace, homes, rates, pattern)
    read = _median(rounds, "samples", system, "read_bytes")
    written = _median(rounds, "samples", system, "written_bytes")
    moving = max(
        read / rates.ssd_read, written / rates.ssd_write, (read + written) / rates.ssd_together
    )
    return Prediction(
        name=name,
        budget=budget,
        measured_seconds=_median(rounds, "samples", system, "step_seconds"),
        measured_read_bytes=read,
        measured_written_bytes=written,
        bound_seconds=max(_median(rounds, "samples", "plain", "step_seconds"), moving),
        predicted=predicted,
    )


def _median(rounds: Sequence[Mapping[str, Any]], *keys: str) -> float:
    """The median over rounds of what lies at ``keys``; of a list its mean is taken first."""
    found = []
    for entry in rounds:
        value: Any = entry
        for key in keys:
            value = value[key]
        found.append(statistics.mean(value) if isinstance(value, list) else value)
    return float(statistics.median(found))
