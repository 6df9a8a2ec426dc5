"""What train_gpt.py measures, and how it shows that: a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

MIB = 1 << 20
TIERS = {"host": "tab:blue", "device": "tab:green", "nvme": "moccasin"}


@dataclass(kw_only=True)
class Measurements:
    """What one worker process saw; lists have an entry a step. Memory in bytes, times in seconds,
    `clock` being the time of day at the end of each step.
    """

    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    tiers: list[dict[str, int]] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    num_parameters: int = 0
    start_rss: int = 0
    peak_rss: int = 0
    peak_held: int = 0
    peak_device: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    sample: str = ""


def process_memory(entry: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == entry:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no {entry}")


def report_table(runs: list[Measurements], plain: Measurements) -> Table:
    """What the offloaded halves and plain PyTorch took, side by side."""
    reports = [run.report for run in runs]
    budget = reports[0]["budget_host_bytes"]
    state = 12 * runs[0].num_parameters
    losses = [loss for run in runs for loss in run.losses]
    seconds = [s for run in runs for s in run.step_seconds[1:]]
    apart = max(abs(a - b) for a, b in zip(losses, plain.losses, strict=False))

    def total(name: str) -> float:
        return float(sum(report[name] for report in reports))

    table = Table(title=f"{runs[0].num_parameters:,} parameters, {len(losses)} steps")
    for heading in ("", "infinity.offload", "plain PyTorch"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[tuple[str, str, str]] = [
        ("training state", mib(state), mib(state)),
        ("host memory budget", mib(budget), "none"),
        ("  held by the library, at most", mib(max(r.peak_held for r in runs)), ""),
        ("process, at most", mib(max(r.peak_rss for r in runs)), mib(plain.peak_rss)),
        (
            "  above interpreter and torch",
            mib(max(r.peak_rss - r.start_rss for r in runs)),
            mib(plain.peak_rss - plain.start_rss),
        ),
        ("step, median", f"{median(seconds):.2f} s", f"{median(plain.step_seconds[1:]):.2f} s"),
        ("waited for the library", f"{total('stall_seconds'):.1f} s of {sum(seconds):.0f} s", ""),
        ("read, compute, write at once", f"{total('overlap_seconds'):.1f} s", ""),
        ("read from NVMe", f"{total('read_bytes') / 1e9:.1f} GB", ""),
        ("written to NVMe", f"{total('written_bytes') / 1e9:.1f} GB", ""),
        *((f"in {tier} at the end", mib(n), "") for tier, n in runs[-1].tiers[-1].items()),
        ("loss, first and last steps", f"{losses[0]:.3f} to {mean(losses[-5:]):.3f}", ""),
        (f"  largest difference in {len(plain.losses)} steps", f"{apart:.4f}", ""),
    ]
    if plain.peak_device:
        most = max(run.peak_device for run in runs)
        rows.insert(5, ("GPU memory, at most", mib(most), mib(plain.peak_device)))
    for row in rows:
        table.add_row(*row)
    return table


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def draw(path: Path, runs: list[Measurements], plain: Measurements) -> None:
    """The loss of every step, and the memory of every tier over time, resume point marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for run, name in zip(runs, ("first process", "second process"), strict=True):
        steps = range(run.first_step + 1, run.first_step + 1 + len(run.losses))
        left.plot(steps, run.losses, label=name)
    left.plot(range(1, len(plain.losses) + 1), plain.losses, "k.", label="plain PyTorch")
    left.axvline(runs[1].first_step + 0.5, color="gray", linestyle=":", label="checkpoint, resume")
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="Loss")
    left.legend()
    start = runs[0].clock[0] - runs[0].step_seconds[0]
    for run in runs:
        times = [moment - start for moment in run.clock]
        sizes = [[step.get(tier, 0) / MIB for step in run.tiers] for tier in TIERS]
        right.stackplot(times, sizes, colors=TIERS.values(), labels=[f"in {t}" for t in TIERS])
        right.plot(times, [rss / MIB for rss in run.rss], "k", label="whole process")
    budget = runs[0].report["budget_host_bytes"] / MIB
    right.axhline(budget, color="tab:red", linestyle="--", label="host_memory")
    right.axhline(plain.peak_rss / MIB, color="gray", linestyle="--", label="plain PyTorch, peak")
    right.axvline(runs[1].clock[0] - start, color="gray", linestyle=":")
    right.set(xlabel="seconds", ylabel="MiB", title="Memory", ylim=(0, None))
    handles, labels = right.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    right.legend(
        once.values(), once.keys(), loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3
    )
    figure.savefig(path, dpi=120)
