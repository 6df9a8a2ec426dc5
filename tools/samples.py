"""What the benchmarks make of their samples: medians with their spread, ratios, seconds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def seconds_of(work: Callable[[], object]) -> float:
    """What one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile); of a single value that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def extremes(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Pair by pair, so that what slows a whole round cancels out."""
    return [value / other for value, other in zip(values, others, strict=True)]


def as_text(spread: tuple[float, float, float], digits: int) -> str:
    """``median (low-high)``."""
    middle, low, high = spread
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def cpu_name() -> str:
    """As the kernel has it, or the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
