"""From samples to figures: medians, spreads, shares of the disks' limit, the setting to take.

The disks' limit is what each of them gave to raw I/O alone, added up over the disks a row uses. A
share of it compares figures of the same run, so that a disk that is slow for a while is slow for
both sides. Speeds are bytes per second. No I/O.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.measure.measuring import Row, Sample

Direction = Literal["save", "load"]
DIRECTIONS: tuple[Direction, ...] = ("save", "load")

CLOSE_ENOUGH = 0.02
"""Settings whose times differ by less than this part count as equally fast."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some runs, and the lowest and highest of them."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out for one row: seconds, speeds, the limit of its disks and the share of that."""

    row: Row
    returned_seconds: Spread
    durable_seconds: Spread
    load_seconds: Spread
    speed: Mapping[Direction, Spread]
    limit: Mapping[Direction, Spread]
    share: Mapping[Direction, Spread]


@dataclass(frozen=True, slots=True)
class Results:
    """Figures of every row that has samples. `limits`: speed of each disk alone, by directory."""

    figures: tuple[Figures, ...]
    limits: Mapping[Path, Figures]
    failures: tuple[tuple[Row, str], ...]
    num_runs: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def speed(sample: Sample, direction: Direction) -> float:
    """Bytes per second; a save's seconds are those until it was durable."""
    if direction == "save":
        return sample.saved_bytes / sample.durable_seconds
    return sample.loaded_bytes / sample.load_seconds


def summarize(rows: Sequence[Row], disks: Callable[[Sequence[Path]], Sequence[Path]]) -> Results:
    """Figures of complete runs. `disks` names the directories whose limits add up for a row."""
    healthy = [row for row in rows if row.failure is None]
    num_runs = min((len(row.samples) for row in healthy), default=0)
    limits = {row.contestant.directories[0]: row for row in rows if row.contestant.role == "limit"}
    figures = {
        id(row): _figures(row, num_runs, [limits[path] for path in disks(_directories(row))])
        for row in healthy
        if num_runs
    }
    return Results(
        tuple(figures.values()),
        {path: figures[id(row)] for path, row in limits.items() if num_runs},
        tuple((row, row.failure) for row in rows if row.failure is not None),
        num_runs,
    )


def _directories(row: Row) -> Sequence[Path]:
    return row.contestant.directories


def _figures(row: Row, num_runs: int, limits: Sequence[Row]) -> Figures:
    samples = row.samples[:num_runs]
    speeds = {way: [speed(sample, way) for sample in samples] for way in DIRECTIONS}
    totals = {
        way: [sum(speed(limit.samples[run], way) for limit in limits) for run in range(num_runs)]
        for way in DIRECTIONS
    }
    return Figures(
        row,
        spread([sample.returned_seconds for sample in samples]),
        spread([sample.durable_seconds for sample in samples]),
        spread([sample.load_seconds for sample in samples]),
        {way: spread(speeds[way]) for way in DIRECTIONS},
        {way: spread(totals[way]) for way in DIRECTIONS},
        {way: _shares(speeds[way], totals[way]) for way in DIRECTIONS},
    )


def _shares(speeds: Sequence[float], totals: Sequence[float]) -> Spread:
    return spread([own / total for own, total in zip(speeds, totals, strict=True)])


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting to take, its figures, and how many it was the choice of.

    `num_close` of the others were as fast within `CLOSE_ENOUGH`, and took more.
    """

    setting: Setting
    figures: Figures
    num_settings: int
    num_close: int


def recommend(results: Results) -> Recommendation | None:
    """Of the fastest settings over the most directories the one that takes least.

    Time is that of a durable save and a load together, of the first state that was measured.
    """
    own = [one for one in results.figures if one.row.contestant.role == "infinity"]
    if not own:
        return None
    most = max(len(_directories(one.row)) for one in own)
    own = [
        one
        for one in own
        if len(_directories(one.row)) == most and one.row.contestant.workload == 0
    ]
    fastest = min(_total_seconds(one) for one in own)
    close = [one for one in own if _total_seconds(one) <= fastest * (1 + CLOSE_ENOUGH)]
    best = min(close, key=lambda one: _cost(_setting(one)))
    return Recommendation(_setting(best), best, len(own), len(close) - 1)


def _total_seconds(figures: Figures) -> float:
    return figures.durable_seconds.median + figures.load_seconds.median


def _setting(figures: Figures) -> Setting:
    setting = figures.row.contestant.setting
    assert setting is not None
    return setting


def _cost(setting: Setting) -> tuple[int, ...]:
    """What a setting takes: memory first, then threads, then bytes and requests in flight."""
    in_flight = setting.queue_depth * setting.block_bytes
    return setting.staging_bytes, setting.lanes or 0, in_flight, setting.queue_depth
