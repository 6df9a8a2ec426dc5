"""Draws the timeline that ``offloaded.trace(path)`` writes: a picture of what overlapped with what.

Time runs to the right. There is a lane for each kind of event (forward, backward, kernel, reads,
writes, copies, stalls); events of one kind that overlap are stacked in as many rows as it takes. A
stall has the name of the parameter that training waited for where there is room to write it, and
the longest ones are listed below the lanes.

python tools/trace_view.py trace.json trace.png [--from 1.5 --to 2.5]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANES = {
    "forward": "#4c72b0",
    "backward": "#8172b3",
    "kernel": "#55a868",
    "read": "#64b5cd",
    "write": "#ccb974",
    "copy": "#937860",
    "stall": "#c44e52",
}
"""The kinds of events, from top to bottom, and their colours."""
MAX_ROWS = 8
_LONGEST_STALLS = 5
_NAMED_PART = 0.06
"""A stall is named in its lane if it takes so much of the picture's width."""


@dataclass(frozen=True, slots=True)
class Span:
    """An event in seconds since the block began, in a row of its lane."""

    kind: str
    label: str
    start: float
    stop: float
    row: int = 0


def spans_of(trace: dict[str, Any], since: float = 0.0, until: float = float("inf")) -> list[Span]:
    """The events of a trace that touch ``[since, until]``, by time, each in a row of its lane.

    Raises ``ValueError`` for what is no trace of ours.
    """
    try:
        spans = [
            Span(
                kind=event["cat"],
                label=event["name"],
                start=event["ts"] / 1e6,
                stop=(event["ts"] + event["dur"]) / 1e6,
            )
            for event in trace["traceEvents"]
            if event.get("ph") != "M"  # names of rows
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no trace that offloaded.trace() wrote: {error}") from error
    unknown = {span.kind for span in spans} - LANES.keys()
    if unknown:
        raise ValueError(f"events of unknown kinds: {', '.join(sorted(unknown))}")
    chosen = [span for span in spans if span.stop >= since and span.start <= until]
    return _in_rows(sorted(chosen, key=lambda span: (span.start, span.stop)))


def _in_rows(spans: Sequence[Span]) -> list[Span]:
    """Each span in the first row of its lane that is free when it starts; the last row takes what
    is too much.
    """
    free_at: dict[str, list[float]] = {}
    placed = []
    for span in spans:
        rows = free_at.setdefault(span.kind, [])
        free = (row for row, stop in enumerate(rows) if stop <= span.start)
        row = next(free, min(len(rows), MAX_ROWS - 1))
        if row == len(rows):
            rows.append(span.stop)
        rows[row] = max(rows[row], span.stop)
        placed.append(Span(span.kind, span.label, span.start, span.stop, row))
    return placed


def longest_stalls(spans: Sequence[Span]) -> list[Span]:
    stalls = [span for span in spans if span.kind == "stall"]
    return sorted(stalls, key=lambda span: span.start - span.stop)[:_LONGEST_STALLS]


def draw(spans: Sequence[Span], path: Path) -> None:
    """Write the picture; its format is that of the suffix of ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {
        kind: 1 + max((span.row for span in spans if span.kind == kind), default=0)
        for kind in LANES
    }
    begin, end = (min(s.start for s in spans), max(s.stop for s in spans)) if spans else (0.0, 1.0)
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.22 * sum(rows.values())))
    top = 0
    ticks = []
    for kind, colour in LANES.items():
        lane = [span for span in spans if span.kind == kind]
        for row in range(rows[kind]):
            bars = [(s.start, s.stop - s.start) for s in lane if s.row == row]
            axes.broken_barh(bars, (top + row + 0.05, 0.9), color=colour, linewidth=0)
        if kind == "stall":
            for span in lane:
                if span.stop - span.start >= _NAMED_PART * (end - begin):
                    at = (span.start + span.stop) / 2
                    axes.text(
                        at, top + span.row + 0.5, span.label, ha="center", va="center", size=6
                    )
        ticks.append(top + rows[kind] / 2)
        axes.axhline(top, color="0.85", linewidth=0.6)
        top += rows[kind]
    axes.set_yticks(ticks, [f"{kind} ({sum(s.kind == kind for s in spans)})" for kind in LANES])
    axes.set_ylim(top, 0)
    axes.set_xlim(begin, end if end > begin else begin + 1.0)
    axes.set_xlabel(_caption(spans), size=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _caption(spans: Sequence[Span]) -> str:
    stalls = longest_stalls(spans)
    text = "\n".join(
        f"{1e3 * (s.stop - s.start):.1f} ms at {s.start:.3f} s waiting for {s.label}"
        for s in stalls
    )
    return "seconds since the block began" + (f"\nlongest stalls:\n{text}" if text else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="since", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--to", dest="until", type=float, default=float("inf"), metavar="SECONDS")
    options = parser.parse_args(arguments)
    spans = spans_of(json.loads(options.trace.read_text()), options.since, options.until)
    draw(spans, options.picture)
    print(f"{len(spans)} events in {options.picture}")


if __name__ == "__main__":
    main()
