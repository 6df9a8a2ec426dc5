"""Results as a table for a terminal, and the sentences below it. Paths and names are shown as they
are: to rich a `[` in a `str` may be markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from checkpoint.bench.conditions.settings import Setting, varying_fields
from checkpoint.bench.conditions.workload import Workload
from checkpoint.bench.measure.comparisons import Comparison
from checkpoint.bench.measure.results import (
    DIRECTIONS,
    Direction,
    Figures,
    Recommendation,
    Results,
    Spread,
)

_GB = 1e9


def results_table(
    results: Results, workloads: Sequence[Workload], *, plus_minus: str = "±"
) -> Table:
    """A row for every contestant; columns of settings only where they differ. `plus_minus` is that
    sign, or what stands for it.
    """
    settings = [
        one.row.contestant.setting
        for one in results.figures
        if one.row.contestant.setting is not None and one.row.contestant.role != "limit"
    ]
    varying = varying_fields(settings)
    disks = list(results.limits)
    caption = Text(_caption(results, plus_minus), style="table.caption")
    table = Table(caption=caption, caption_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("system", no_wrap=True)
    table.add_column("dirs", justify="right", no_wrap=True)
    if len(workloads) > 1:
        table.add_column("state", no_wrap=True)
    for name in varying:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for title in ("returned\ns", "durable\ns", "save\nGB/s", "of\nlimit"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("loaded\ns", "load\nGB/s", "of\nlimit"):
        table.add_column(title, justify="right", no_wrap=True)
    for role in ("limit", "raw", "infinity", "peer"):
        for figures in results.figures:
            if figures.row.contestant.role == role:
                cells = _cells(figures, workloads, varying, plus_minus)
                if role == "limit":
                    number = disks.index(figures.row.contestant.directories[0]) + 1
                    cells[0] = f"disk {number} alone"
                table.add_row(*map(Text, cells))
        table.add_section()
    return table


def _caption(results: Results, plus_minus: str) -> str:
    runs = "1 run"
    if results.num_runs > 1:
        runs = f"median {plus_minus} half the range of {results.num_runs} runs"
    disks = [f"disk {number} is {path}" for number, path in enumerate(results.limits, 1)]
    return "\n".join([f"{runs}; the limit is what each disk gives alone, added up", *disks])


def _cells(
    figures: Figures, workloads: Sequence[Workload], varying: Sequence[str], plus_minus: str
) -> list[str]:
    contestant = figures.row.contestant
    cells = [contestant.system.name, str(len(contestant.directories))]
    if len(workloads) > 1:
        label = workloads[contestant.workload].label
        cells.append(label if contestant.system.has_tensors else "")
    texts = _setting_texts(contestant.setting, shown=contestant.role != "limit")
    cells += [texts.get(field, "") for field in varying]
    return [
        *cells,
        f"{figures.returned_seconds.median:.3f}",
        _spread(figures.durable_seconds, plus_minus),
        f"{figures.speed['save'].median / _GB:.2f}",
        _share(figures, "save"),
        _spread(figures.load_seconds, plus_minus),
        f"{figures.speed['load'].median / _GB:.2f}",
        _share(figures, "load"),
    ]


def _setting_texts(setting: Setting | None, *, shown: bool) -> dict[str, str]:
    return setting.texts() if setting is not None and shown else {}


def _spread(values: Spread, plus_minus: str) -> str:
    """The median, and how far the runs lie apart: half of it, as a part of the median."""
    half = (values.high - values.low) / 2 / values.median
    return f"{values.median:.3f} {plus_minus}{half:3.0%}"


def _share(figures: Figures, way: Direction) -> str:
    return f"{figures.share[way].median:.0%}"


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """How many times as fast one was as the other, in the same runs."""
    caption = "ratios of speeds within each run: median (lowest to highest)"
    table = Table(caption=caption, caption_justify="left", box=SIMPLE, pad_edge=False)
    for title in ("speed of", "as a multiple of", "saving", "loading"):
        table.add_column(title, no_wrap=True)
    for one in comparisons:
        ratios = [_ratio(one.ratio[way]) for way in DIRECTIONS]
        table.add_row(*map(Text, [one.subject, one.reference, *ratios]))
    return table


def _ratio(values: Spread) -> str:
    return f"{values.median:.2f} ({values.low:.2f} to {values.high:.2f})"


def recommendation_text(
    recommendation: Recommendation, *, num_directories: int
) -> list[RenderableType]:
    """The setting to take, as sentences and as code."""
    setting = recommendation.setting
    save, load = (recommendation.figures.speed[way].median / _GB for way in DIRECTIONS)
    if recommendation.num_settings == 1:
        head = f"Measured setting: {setting}. --sweep compares settings."
    else:
        head = (
            f"Recommended of {recommendation.num_settings} settings: {setting}; "
            f"saves {save:.2f} GB/s, loads {load:.2f} GB/s"
        )
        if recommendation.num_close:
            head += f"; {recommendation.num_close} more are as fast within 2 % and take more"
    code = (
        f"engine = aio.Engine({setting.backend!r}, queue_depth={setting.queue_depth}, "
        f"block_bytes={setting.block_bytes}, lanes={setting.lanes_for(num_directories)})\n"
        f"checkpoint.save(state, path, stripe_dirs, engine, "
        f"staging_bytes={setting.staging_bytes})"
    )
    return [Text(head), Text(code, style="cyan")]


def closing_notes(
    results: Results, skipped: Sequence[tuple[str, str]], cache: str
) -> list[RenderableType]:
    """What one has to know beside the figures."""
    notes = [f"Reads: {cache}."]
    notes += [f"Left out: {name}: {reason}." for name, reason in skipped]
    for row, failure in results.failures:
        notes.append(f"Failed: {row.contestant.system.name}: {failure}")
    return [Text(note, style="dim") for note in notes]
