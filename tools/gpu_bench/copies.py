"""Copies between host and device during training, as the device itself times them.

The profiler's trace has an event for each copy, with its bytes and when the copy engine had it, in
whatever thread and through whatever call it was given.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

LEAST_BYTES = 1 << 20
"""Of a copy that counts: a smaller one takes the time of its start."""
_WAYS = {"HtoD": "up", "DtoH": "down"}


def copies_during(work: Callable[[], object], device: str) -> dict[str, dict[str, float]]:
    """By "up" and "down" what ``rates_of`` has of the copies that ``work`` makes; of a CPU nothing.

    ``work`` waits for the device itself.
    """
    if device == "cpu":
        work()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return rates_of(json.loads(path.read_text())["traceEvents"])


def rates_of(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """``bytes``, ``seconds`` in which such a copy was under way, ``rate`` of the two, and
    ``pageable``, bytes of copies that no registered memory was at one end of.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy" and event["args"].get("bytes", 0) >= LEAST_BYTES:
            for mark, way in _WAYS.items():
                if mark in event["name"]:
                    found.setdefault(way, []).append(event)
    return {way: _rate(copies) for way, copies in found.items()}


def _rate(copies: list[dict[str, Any]]) -> dict[str, float]:
    nbytes = sum(copy["args"]["bytes"] for copy in copies)
    seconds = _covered((copy["ts"], copy["ts"] + copy["dur"]) for copy in copies) / 1e6
    pageable = sum(copy["args"]["bytes"] for copy in copies if "Pageable" in copy["name"])
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "rate": nbytes / seconds,
        "pageable": pageable,
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``spans``."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total
