"""The rows for docs/BENCHMARKS.md, from what the pieces have written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from disk_bandwidth import Bandwidth
from samples import as_text, extremes

Found = Mapping[str, Any]
HEAD = "| what | measured | target |\n|---|---|---|\n"
_TARGETS = {"host32k": 0.99, "host16k": 0.90, "host8k": 0.60}
_GIB = 1 << 30


def rows_of(folder: Path) -> str:
    """A table; a piece that has not been run, or was cut off before it had anything, has no row."""
    rows: list[Sequence[str]] = []
    for piece, make in _ROWS.items():
        path = folder / f"{piece}.json"
        if path.exists():
            found = json.loads(path.read_text())
            rows += _rows_of_piece(piece, found, make)
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows_of_piece(
    piece: str, found: Found, make: Callable[[Found], Iterator[Sequence[str]]]
) -> Iterator[Sequence[str]]:
    if "skipped" in found and piece != "tests":
        yield piece, f"not run: {found['skipped']}", ""
        return
    yield from make(found)
    if not found["complete"]:
        yield piece, f"not complete: {found.get('error', 'cut off')}", ""


def _tests(found: Found) -> Iterator[Sequence[str]]:
    if "passed" in found:
        failed, skipped = found["failed"], found["skipped"]
        counts = f"{found['passed']} passed, {len(failed)} failed, {sum(skipped.values())} skipped"
        yield "tests on the GPU", counts + "".join(f"; {name}" for name in failed), "0 failed"


def _rates(found: Found) -> Iterator[Sequence[str]]:
    for way, rate in found.get("link", {}).items():
        yield f"link, {way}, GB/s", _gigabytes(rate), ""
    if "host" in found:
        yield "AdamW on the CPU, G parameters/s", f"{found['host']['adam'] / 1e9:.2f}", ""
    if "disk" in found:
        disk = found["disk"]
        ways = ", ".join(f"{way} {disk[way] / 1e9:.2f}" for way in ("read", "write", "both"))
        yield "disks, GB/s", ways, ""
    if "fio" in found:
        ways = ", ".join(f"{way} {rate / 1e9:.2f}" for way, rate in found["fio"].items())
        yield "the first of them by fio, GB/s", ways, ""


def _host(found: Found) -> Iterator[Sequence[str]]:
    name, target = _name(found), f">= {_TARGETS[found['piece']]}"
    yield from _bits(found, name)
    if found.get("rounds"):
        speeds = [_of(entry, "offloaded", "tokens_per_second") for entry in found["rounds"]]
        ratios = [
            own / _of(entry, "memory", "tokens_per_second")
            for own, entry in zip(speeds, found["rounds"], strict=True)
        ]
        yield f"{name}: tokens/s", as_text(extremes(speeds), 0), ""
        yield f"{name}: over all in device memory", as_text(extremes(ratios), 3), target
        yield from _budgets(found, name)
    for way, copies in found.get("copies", {}).items():
        if "link" in found:
            over = copies["rate"] / found["link"][way][0]
            text = f"{copies['rate'] / 1e9:.1f} GB/s, {over:.2f} of the link"
            yield f"{name}: copies {way}", text, ">= 0.90"


def _nvme(found: Found) -> Iterator[Sequence[str]]:
    name = f"{_name(found)}, half on NVMe"
    yield from _bits(found, name)
    if found.get("rounds"):
        ratios = [_over_limit(entry) for entry in found["rounds"]]
        text = as_text(extremes(ratios), 3)
        yield f"{name}: step over max(compute, bytes / disk)", text, "<= 1.05"
        yield from _budgets(found, name)


def _large(found: Found) -> Iterator[Sequence[str]]:
    name = _name(found)
    for entry in found.get("rounds", []):
        yield f"{name}: trains, s a step", f"{_of(entry, 'offloaded', 'step_seconds'):.2f}", "runs"
        yield from _budgets(found, name)


def _save(found: Found) -> Iterator[Sequence[str]]:
    if "save summary" in found:
        row = found["save summary"]["guard"]
        longer = [100 * (value - 1) for value in row["step over none"]]
        state = f"{found['state_bytes'] / 1e9:.1f} GB"
        yield f"a durable save of {state} each step, % longer", as_text(_three(longer), 2), "<= 1"
        hidden = row["durable over forward and backward"]
        yield "the save over forward and backward", as_text(_three(hidden), 2), "< 1, or it shows"


def _deepspeed(found: Found) -> Iterator[Sequence[str]]:
    if found.get("rounds"):
        ratios = [
            _of(entry, "deepspeed", "step_seconds") / _of(entry, "offloaded", "step_seconds")
            for entry in found["rounds"]
        ]
        text = as_text(extremes(ratios), 2)
        yield f"{_name(found)}: times as fast as DeepSpeed ZeRO-3 on the host", text, ""


def _bits(found: Found, name: str) -> Iterator[Sequence[str]]:
    if "bits" in found:
        bits = found["bits"]
        losses = "the same losses" if bits["same_losses"] else "other losses"
        text = f"{losses}, {bits['different_parameters']} of {bits['parameters']} weights differ"
        yield f"{name}: after {bits['steps']} steps, clipped", text, "the same bits"


def _budgets(found: Found, name: str) -> Iterator[Sequence[str]]:
    samples = [entry["samples"]["offloaded"] for entry in found["rounds"]]
    host = max(s["host_peak_bytes"] - s["host_bytes_before"] for s in samples)
    counted = max(s["counted_host_bytes"] for s in samples)
    budget = samples[0]["budget_host_bytes"]
    text = f"{_gib(host)} beyond the start, {_gib(counted)} by its own count"
    yield f"{name}: host memory, GiB", text, f"<= {_gib(budget)} and the interpreter"
    peaks = [s["device_peaks"] for s in samples if s["device_peaks"]]
    if peaks:
        text = ", ".join(f"{_gib(max(p[kind] for p in peaks))} {kind}" for kind in peaks[0])
        budget, beside = samples[0]["budget_device_bytes"], found["activation_bytes"]
        target = f"<= {_gib(budget)} and some {_gib(beside)} of activations"
        yield f"{name}: device memory, GiB", text, target


def _over_limit(entry: Found) -> float:
    sample = entry["samples"]["offloaded"]
    disk = Bandwidth(**entry["disk"])
    io_seconds = disk.seconds(sample["read_bytes"], sample["written_bytes"])
    limit = max(_of(entry, "memory", "step_seconds"), io_seconds)
    return float(sample["step_seconds"] / limit)


def _of(entry: Found, system: str, name: str) -> float:
    return float(entry["samples"][system][name])


def _name(found: Found) -> str:
    return f"{found['parameters'] / 1e9:.3g} B, {found['tokens']} tokens a step"


def _gigabytes(rate: Sequence[float]) -> str:
    return as_text(_three([value / 1e9 for value in rate]), 1)


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    middle, low, high = values
    return middle, low, high


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f}"


_ROWS: dict[str, Callable[[Found], Iterator[Sequence[str]]]] = {
    "tests": _tests,
    "rates": _rates,
    **dict.fromkeys(_TARGETS, _host),
    "nvme": _nvme,
    "large": _large,
    "save": _save,
    "deepspeed": _deepspeed,
}
