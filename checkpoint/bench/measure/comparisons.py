"""How much faster one system was than another, run by run. No I/O.

Both sides of a ratio come from the same run, minutes apart at most, so that what disturbs the disks
for longer disturbs both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint.bench.conditions.workload import Workload
from checkpoint.bench.measure.results import (
    DIRECTIONS,
    Direction,
    Figures,
    Recommendation,
    Results,
    Spread,
    speed,
    spread,
)
from checkpoint.bench.systems.system import Infinity


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speed of `subject` as a multiple of that of `reference`."""

    subject: str
    reference: str
    ratio: dict[Direction, Spread]


def compare(
    results: Results, recommendation: Recommendation | None, workloads: Sequence[Workload]
) -> list[Comparison]:
    """Raw I/O against fio, this library against its peers, states against the last one named.

    Of a sweep the recommended setting stands for this library.
    """
    pairs = [*_against_fio(results)]
    if recommendation is not None:
        own = [
            one
            for one in results.figures
            if one.row.contestant.role == "infinity"
            and one.row.contestant.setting == recommendation.setting
        ]
        pairs += [*_against_peers(results, own), *_between_states(own)]
    return [_comparison(*pair, workloads) for pair in pairs]


def _against_fio(results: Results) -> Iterator[tuple[Figures, Figures]]:
    for one in results.figures:
        for other in results.figures:
            mine, theirs = one.row.contestant, other.row.contestant
            same = mine.setting == theirs.setting and mine.directories == theirs.directories
            if mine.role == "raw" and theirs.system.name == "fio" and same:
                yield one, other


def _against_peers(results: Results, own: Sequence[Figures]) -> Iterator[tuple[Figures, Figures]]:
    for one in own:
        for other in results.figures:
            mine, theirs = one.row.contestant, other.row.contestant
            if theirs.role != "peer" or not theirs.system.has_tensors:
                continue
            own_kind = isinstance(theirs.system, Infinity)
            if own_kind and theirs.directories != mine.directories:
                continue
            if theirs.workload == mine.workload:
                yield one, other


def _between_states(own: Sequence[Figures]) -> Iterator[tuple[Figures, Figures]]:
    last = max((one.row.contestant.workload for one in own), default=0)
    for one in own:
        for other in own:
            mine, theirs = one.row.contestant, other.row.contestant
            if mine.workload < theirs.workload == last and mine.directories == theirs.directories:
                yield one, other


def _comparison(one: Figures, other: Figures, workloads: Sequence[Workload]) -> Comparison:
    ratio = {}
    for way in DIRECTIONS:
        pairs = zip(one.row.samples, other.row.samples, strict=False)
        ratio[way] = spread([speed(mine, way) / speed(theirs, way) for mine, theirs in pairs])
    return Comparison(describe(one, workloads), describe(other, workloads), ratio)


def describe(figures: Figures, workloads: Sequence[Workload]) -> str:
    """A row in a few words: its system, how many directories, and the state if there are several"""
    contestant = figures.row.contestant
    number = len(contestant.directories)
    parts = [contestant.system.name, f"{number} dir" if number == 1 else f"{number} dirs"]
    if len(workloads) > 1 and contestant.system.has_tensors:
        parts.append(workloads[contestant.workload].label)
    if not contestant.system.has_tensors and contestant.setting is not None:
        texts = contestant.setting.texts()
        parts += [f"{texts['backend']} {texts['depth']} x {texts['block']}"]
    return ", ".join(parts)
