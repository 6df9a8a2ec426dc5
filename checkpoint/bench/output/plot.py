"""Results as a picture: bars beside the disks' limit, and curves over depth and block size."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.bench.conditions.settings import Setting, varying_fields
from checkpoint.bench.conditions.units import format_size
from checkpoint.bench.conditions.workload import Workload
from checkpoint.bench.measure.comparisons import describe
from checkpoint.bench.measure.results import DIRECTIONS, Direction, Figures, Results
from checkpoint.bench.output.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GB = 1e9
_COLORS: dict[Direction, str] = {"save": "#c1553b", "load": "#3b7bc1"}
_AXES: dict[str, tuple[str, Callable[[Setting], float]]] = {
    "depth": ("queue depth", lambda setting: setting.queue_depth),
    "block": ("block size, KiB", lambda setting: setting.block_bytes / 1024),
    "staging": ("staging, MiB", lambda setting: setting.staging_bytes / (1 << 20)),
}


def draw(results: Results, workloads: Sequence[Workload], path: Path) -> None:
    """Writes the picture; its format is that of the name. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = _best_of_each(results)
    own = [one for one in results.figures if one.row.contestant.role == "infinity"]
    swept = [name for name in varying_fields([_setting(one) for one in own]) if name in _AXES]
    num_panels = 3 if swept else 1
    figure = Figure(figsize=(18.0 if swept else 7.0, _height(len(bars))))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, num_panels, squeeze=False)[0]
    _draw_bars(axes[0], bars, [_label(one, results, workloads) for one in bars])
    for axis, way in zip(axes[1:], DIRECTIONS, strict=False):
        _draw_curves(axis, _curves(own, swept[0], workloads), swept[0], way)
    figure.suptitle(_title(results, workloads), fontsize=10)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    write_output(path, drawn.getvalue())


def _height(num_bars: int) -> float:
    return max(4.4, 0.55 * num_bars + 1.6)


def _title(results: Results, workloads: Sequence[Workload]) -> str:
    states = " and ".join(f"{format_size(work.nbytes)} ({work.label})" for work in workloads)
    runs = "1 run" if results.num_runs == 1 else f"medians and ranges of {results.num_runs} runs"
    return f"Durable saves and loads of {states}; {runs}"


def _setting(figures: Figures) -> Setting:
    return figures.row.contestant.setting or Setting()


def _group(figures: Figures) -> tuple[str, int, int]:
    contestant = figures.row.contestant
    return contestant.system.name, len(contestant.directories), contestant.workload


def _best_of_each(results: Results) -> list[Figures]:
    """Of rows that differ in settings only, the one that saves fastest."""
    best: dict[tuple[str, int, int], Figures] = {}
    for one in results.figures:
        group = _group(one)
        if one.row.contestant.role == "limit":
            continue
        if group not in best or one.speed["save"].median > best[group].speed["save"].median:
            best[group] = one
    return sorted(best.values(), key=lambda one: _ORDER.index(one.row.contestant.role))


_ORDER = ("raw", "infinity", "peer")


def _label(figures: Figures, results: Results, workloads: Sequence[Workload]) -> str:
    alike = sum(_group(one) == _group(figures) for one in results.figures)
    best = f"\nbest of {alike} settings" if alike > 1 else ""
    return describe(figures, workloads) + best


def _draw_bars(axis: Axes, bars: Sequence[Figures], labels: Sequence[str]) -> None:
    for offset, way in zip((-0.2, 0.2), DIRECTIONS, strict=True):
        places = [index + offset for index in range(len(bars))]
        speeds = [one.speed[way] for one in bars]
        errors = [
            [(each.median - each.low) / _GB for each in speeds],
            [(each.high - each.median) / _GB for each in speeds],
        ]
        middle = [each.median / _GB for each in speeds]
        axis.barh(places, middle, 0.38, xerr=errors, color=_COLORS[way], label=way, ecolor="#333")
        name = "the disks' limit" if way == "save" else None
        limits = [one.limit[way].median / _GB for one in bars]
        axis.scatter(limits, places, marker="|", s=180, color="black", label=name, zorder=3)
    axis.set_yticks(range(len(bars)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("GB/s")
    axis.set_xlim(left=0)
    below = -0.6 / _height(len(bars))
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, below), ncols=3)


def _curves(
    own: Sequence[Figures], axis: str, workloads: Sequence[Workload]
) -> dict[str, list[Figures]]:
    """Rows of this library, those together that differ in what is on the axis only."""
    varying = [name for name in varying_fields([_setting(one) for one in own]) if name != axis]
    curves: dict[str, list[Figures]] = {}
    for one in own:
        texts = _setting(one).texts()
        label = ", ".join(
            [describe(one, workloads), *(f"{name} {texts[name]}" for name in varying)]
        )
        curves.setdefault(label, []).append(one)
    return curves


def _draw_curves(axis: Axes, curves: dict[str, list[Figures]], name: str, way: Direction) -> None:
    title, value = _AXES[name]
    for label, rows in curves.items():
        places = [value(_setting(one)) for one in rows]
        axis.plot(places, [one.speed[way].median / _GB for one in rows], "o-", label=label)
    limits = [rows[0].limit[way].median / _GB for rows in curves.values()]
    axis.axhline(max(limits), color="black", linestyle="--", label="the disks' limit")
    ticks = sorted({value(_setting(one)) for rows in curves.values() for one in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(title)
    axis.set_ylabel(f"{way}, GB/s")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, loc="lower right")
