"""Results as JSON, for other programs. Units are in the names; the layout has a version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from checkpoint.bench.conditions.workload import Workload
from checkpoint.bench.measure.comparisons import Comparison
from checkpoint.bench.measure.results import (
    Direction,
    Figures,
    Recommendation,
    Results,
)
from checkpoint.bench.measure.schedule import Contestant

LAYOUT = 1


def to_json(
    results: Results,
    recommendation: Recommendation | None,
    comparisons: Sequence[Comparison],
    workloads: Sequence[Workload],
    about: Mapping[str, Any],
) -> str:
    """The document. `about` is put at its head: machine, directories, options, page cache."""
    document = {
        "program": "ckpt-bench",
        "layout": LAYOUT,
        **about,
        "num_runs": results.num_runs,
        "workloads": [_workload(workload) for workload in workloads],
        "rows": [_row(figures, workloads) for figures in results.figures],
        "failures": [
            {**_contestant(row.contestant, workloads), "failure": failure}
            for row, failure in results.failures
        ],
        "comparisons": [asdict(one) for one in comparisons],
        "recommended": None if recommendation is None else asdict(recommendation.setting),
    }
    return json.dumps(document, indent=2)


def _workload(workload: Workload) -> dict[str, Any]:
    return {
        "label": workload.label,
        "num_tensors": len(workload.tensors),
        "nbytes": workload.nbytes,
    }


def _contestant(contestant: Contestant, workloads: Sequence[Workload]) -> dict[str, Any]:
    setting = contestant.setting
    return {
        "system": contestant.system.name,
        "role": contestant.role,
        "num_directories": len(contestant.directories),
        "directories": [str(directory) for directory in contestant.directories],
        "workload": workloads[contestant.workload].label,
        "setting": None if setting is None else asdict(setting),
    }


def _row(figures: Figures, workloads: Sequence[Workload]) -> dict[str, Any]:
    seconds = {
        "returned_seconds": asdict(figures.returned_seconds),
        "durable_seconds": asdict(figures.durable_seconds),
    }
    return {
        **_contestant(figures.row.contestant, workloads),
        "save": {**seconds, **_speeds(figures, "save")},
        "load": {"seconds": asdict(figures.load_seconds), **_speeds(figures, "load")},
        "samples": [asdict(sample) for sample in figures.row.samples],
    }


def _speeds(figures: Figures, way: Direction) -> dict[str, Any]:
    return {
        "bytes_per_second": asdict(figures.speed[way]),
        "limit_bytes_per_second": asdict(figures.limit[way]),
        "of_limit": asdict(figures.share[way]),
    }
