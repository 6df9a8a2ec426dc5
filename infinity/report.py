"""What the offload did so far, in numbers and as a table, and its timeline as a trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aio import naming
from checkpoint.directory.destination import check_place
from checkpoint.directory.files.replacing import replace_durably
from infinity.activations.offloading import Activations
from swap.plan.traffic import traffic_of
from swap.storage.drives.endurance import DRIVE_ENDURANCE, Wear, endurance_of
from swap.tiered import TieredState
from swap.tiers import Tier, format_bytes
from swap.timeline import KINDS, Event, Timeline, busy_seconds, overlap_seconds, without


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A snapshot. Bytes unless the name says seconds; traffic and seconds are totals since the
    block began.

    ``resident_bytes``: bytes at home or cached in each tier now. ``peak_host_bytes``: the most host
    memory that the library held at once, of ``budget_host_bytes``. ``stall_seconds``: time in which
    training waited for the library, and ``stalls``: that time by the parameter waited for.
    ``overlap_seconds``: time in which reading, computing and writing went on at once.
    ``activation_bytes``: saved tensors that ``activations`` keeps, by where they are.
    ``step_read_bytes``, ``step_written_bytes``: training state moved in a step, the mean without
    the first steps, beside ``formula_...``: what ``swap.plan.traffic`` has for a step of as many
    ``backward_passes`` as the last one; ``seconds_per_step`` is the mean over the same steps. None
    before there are such. Without an optimizer they are of forward passes, and ``backward_passes``
    is 0. ``endurance_bytes``: what the drives are rated for, see ``wear``.
    """

    steps: int
    elapsed_seconds: float
    budget_host_bytes: int
    peak_host_bytes: int
    resident_bytes: Mapping[str, int]
    planned_bytes: Mapping[str, int]
    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float
    kernel_seconds: float
    compute_seconds: float
    stall_seconds: float
    overlap_seconds: float
    weight_hits: int
    weight_misses: int
    expected_uses: int
    unexpected_uses: int
    backward_passes: int
    step_read_bytes: int | None
    step_written_bytes: int | None
    formula_read_bytes: int
    formula_written_bytes: int
    seconds_per_step: float | None
    endurance_bytes: int
    stalls: Mapping[str, float] = field(default_factory=dict)
    activation_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def wear(self) -> Wear:
        """What steps like those so far do to the drives."""
        written = self.step_written_bytes
        return Wear(
            written_bytes_per_step=self.formula_written_bytes if written is None else written,
            seconds_per_step=self.seconds_per_step,
            endurance_bytes=self.endurance_bytes,
        )

    @property
    def written_bytes_per_step(self) -> int:
        return self.written_bytes // max(1, self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings, for ``json.dumps``."""
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }

    def __str__(self) -> str:
        rows = [
            ("steps", f"{self.steps} in {self.elapsed_seconds:.1f} s"),
            (
                "host memory, peak / budget",
                f"{format_bytes(self.peak_host_bytes)} / {format_bytes(self.budget_host_bytes)}",
            ),
            *((f"in {tier} now", format_bytes(n)) for tier, n in self.resident_bytes.items()),
            *((f"saved tensors {k}", format_bytes(n)) for k, n in self.activation_bytes.items()),
            ("read from NVMe", _rate(self.read_bytes, self.read_seconds)),
            ("written to NVMe", _rate(self.written_bytes, self.write_seconds)),
            *self._moved_rows(),
            *(self.wear.rows() if self.backward_passes else []),
            ("compute (forward, backward)", f"{self.compute_seconds:.2f} s"),
            ("optimizer kernel", f"{self.kernel_seconds:.2f} s"),
            ("read, compute and write at once", f"{self.overlap_seconds:.2f} s"),
            ("stalls", f"{self.stall_seconds:.2f} s"),
            *((f"  waiting for {name}", f"{s:.2f} s") for name, s in self._worst_stalls()),
            ("weights found / fetched", f"{self.weight_hits} / {self.weight_misses}"),
            ("uses foreseen / not", f"{self.expected_uses} / {self.unexpected_uses}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _moved_rows(self) -> list[tuple[str, str]]:
        rows = (
            ("read", self.step_read_bytes, self.formula_read_bytes),
            ("written", self.step_written_bytes, self.formula_written_bytes),
        )
        unit = "step" if self.backward_passes else "pass"
        return [
            (
                f"{what} per {unit}, moved / formula",
                f"{'-' if moved is None else format_bytes(moved)} / {format_bytes(formula)}",
            )
            for what, moved, formula in rows
        ]

    def _worst_stalls(self) -> list[tuple[str, float]]:
        return sorted(self.stalls.items(), key=lambda item: -item[1])[:3]


def _rate(nbytes: int, seconds: float) -> str:
    rate = f", {format_bytes(nbytes / seconds)}/s while busy" if seconds else ""
    return f"{format_bytes(nbytes)}{rate}"


def make_report(
    state: TieredState,
    activations: Activations,
    budget_host_bytes: int,
    steps: int,
    drive_endurance: int | str = DRIVE_ENDURANCE,
    passing_host_bytes: int = 0,
) -> Report:
    """Count everything up; costs a pass over the recent timeline."""
    timeline = state.timeline
    events = timeline.events()
    stalls: dict[str, float] = {}
    for event in events:
        if event.kind == "stall":
            stalls[event.label] = stalls.get(event.label, 0.0) + event.stop - event.start
    computing = [*without(events, ("forward", "backward"), "stall"), *_of(events, "kernel")]
    transfers = _of(events, "read", "write")
    moved = timeline.moved_per_step()
    drives = 1 if state.extents is None else state.extents.num_directories
    passes = max(1, state.speculation.backward_passes) if state.rule.takes_steps else 0
    formula = traffic_of(state.placement, backward_passes=passes)
    return Report(
        steps=steps,
        elapsed_seconds=time.perf_counter() - timeline.started_at,
        budget_host_bytes=budget_host_bytes,
        peak_host_bytes=state.peak_host_bytes + activations.peak_budget_bytes + passing_host_bytes,
        resident_bytes=resident_bytes(state),
        planned_bytes=planned_bytes(state) | {"activations in host": activations.budget_bytes},
        activation_bytes=activations.counts(),
        read_bytes=timeline.nbytes["read"],
        written_bytes=timeline.nbytes["write"],
        read_seconds=busy_seconds(events, ["read"]),
        write_seconds=busy_seconds(events, ["write"]),
        kernel_seconds=timeline.seconds["kernel"],
        compute_seconds=timeline.seconds["forward"] + timeline.seconds["backward"],
        stall_seconds=timeline.seconds["stall"],
        overlap_seconds=overlap_seconds(
            [*transfers, *computing], ["read"], ["forward", "backward", "kernel"], ["write"]
        ),
        weight_hits=state.weights.hits,
        weight_misses=state.weights.misses,
        expected_uses=state.weights.schedule.expected_uses,
        unexpected_uses=state.weights.schedule.unexpected_uses,
        backward_passes=passes,
        step_read_bytes=None if moved is None else moved.read,
        step_written_bytes=None if moved is None else moved.written,
        formula_read_bytes=formula.read,
        formula_written_bytes=formula.written,
        seconds_per_step=None if moved is None else moved.seconds,
        endurance_bytes=endurance_of(drive_endurance, drives),
        stalls=stalls,
    )


def _of(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def resident_bytes(state: TieredState) -> dict[str, int]:
    """Bytes in use in each tier now; the arena counts as DEVICE."""
    cached = 0 if state.arena is None else state.arena.used_bytes
    at_home = 0 if state.homes is None else state.homes.nbytes
    visits = 0 if state.visits is None else state.visits.nbytes
    return {
        Tier.DEVICE.value: cached + at_home + visits,
        Tier.HOST.value: state.used_host_bytes,
        Tier.NVME.value: 0 if state.extents is None else state.extents.used_bytes,
    }


def planned_bytes(state: TieredState) -> dict[str, int]:
    """Bytes that the placement gives each purpose."""
    placement = state.placement
    return {
        "state on the device": placement.state_device_bytes,
        "gradients on the device": placement.gradient_device_bytes,
        "state in host": placement.state_host_bytes,
        "gradients in host": placement.gradient_host_bytes,
        "weights arena": placement.arena_bytes,
        "staging": placement.staging_bytes,
        "spill": placement.spill_bytes,
        "gradients from the device": placement.inbox_bytes,
        "passage": placement.passage_bytes,
        "bridge to the device": placement.bridge_bytes,
        "updates on the device": placement.visit_bytes,
        "checksums": placement.checksum_bytes,
        "checkpoint staging": placement.checkpoint_bytes,
        "state on nvme": placement.state_nvme_bytes,
        "gradients on nvme": placement.gradient_nvme_bytes,
    }


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """The timeline in the Trace Event Format: rows for each kind of event, as many as have it at
    once. Viewers drop events of a row that overlap without one being inside the other.
    """
    check_place(path)
    rows: list[tuple[str, int]] = []
    events = []
    for event, row in _in_rows(timeline.events()):
        if row not in rows:
            rows.append(row)
        events.append(
            {
                "name": event.label or event.kind,
                "cat": event.kind,
                "ph": "X",
                "pid": 1,
                "tid": 1 + rows.index(row),
                "ts": (event.start - timeline.started_at) * 1e6,
                "dur": (event.stop - event.start) * 1e6,
                "args": {"bytes": event.nbytes},
            }
        )
    document = {"traceEvents": [*_row_names(rows), *events], "displayTimeUnit": "ms"}
    with naming(path):
        replace_durably(Path(path), json.dumps(document).encode())


def _in_rows(events: Sequence[Event]) -> Iterator[tuple[Event, tuple[str, int]]]:
    """Each event with its kind and the first row of that kind that is free when it starts."""
    ends: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event.start):
        of_kind = ends.setdefault(event.kind, [])
        free = (number for number, end in enumerate(of_kind) if end <= event.start)
        number = next(free, len(of_kind))
        of_kind[number : number + 1] = [event.stop]
        yield event, (event.kind, number)


def _row_names(rows: Sequence[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """What viewers show beside the rows, and the order from top to bottom."""
    order = sorted(rows, key=lambda row: (KINDS.index(row[0]), row[1]))
    for tid, (kind, number) in enumerate(rows, start=1):
        name = {"name": kind if number == 0 else f"{kind} {number + 1}"}
        place = {"sort_index": order.index((kind, number))}
        for what, args in (("thread_name", name), ("thread_sort_index", place)):
            yield {"name": what, "ph": "M", "pid": 1, "tid": tid, "args": args}
