"""A piece: what a durable, checksummed save at every step costs, by ``bench_overlap``."""

from __future__ import annotations

import argparse
import math
import shutil
from typing import Any

import bench_overlap
from disk_bandwidth import measure_disk
from samples import seconds_of

from gpu_bench.context import Context, Record

_SHAPES: dict[str, dict[str, int]] = {
    "full": {"width": 2048, "depth": 10, "vocabulary": 32000, "tokens": 1024, "batch": 8},
    "small": {"width": 64, "depth": 2, "vocabulary": 128, "tokens": 32, "batch": 1},
}
_CYCLES = {"full": 4, "small": 1}
_ROOM = 1.5
"""Seconds of forward and backward beside those of a save: one that does not fit cannot hide."""
_COPIES = 4
"""Of the state on disk: of each of two modes the last save, and the one that takes its place."""


def save(context: Context, record: Record) -> None:
    """Steps with a guarded save and without take turns; everything is in device memory."""
    kind = "small" if context.device == "cpu" else "full"
    options = argparse.Namespace(
        dir=context.nvme,
        device=context.device,
        cycles=_CYCLES[kind],
        accumulate=1,
        json=None,
        **_SHAPES[kind],
    )
    batch_seconds, state_bytes = _batch(options)
    free = shutil.disk_usage(context.nvme[0]).free
    if _COPIES * state_bytes > free:
        raise ValueError(
            f"saves take {_COPIES * state_bytes} bytes, where {free} are free in "
            f"{context.nvme[0]}; name a folder on a larger disk with --nvme"
        )
    probe_bytes = min(state_bytes // 8, 1 << 30) & ~(4095) or 4096
    write = measure_disk(context.nvme, probe_bytes=max(probe_bytes, 16 << 20)).write
    options.accumulate = max(1, math.ceil(_ROOM * state_bytes / write / batch_seconds))
    record.note(state_bytes=state_bytes, write=write, batch_seconds=batch_seconds)
    record.note(**{f"save {name}": value for name, value in bench_overlap.run(options).items()})


def _batch(options: argparse.Namespace) -> tuple[float, int]:
    """Seconds of forward and backward of one batch, and bytes of the state."""
    training = bench_overlap.Training(options)
    training.compute()
    training.optimizer.step()
    seconds = min(seconds_of(training.compute) for _ in range(2))
    state: dict[str, Any] = training.state()
    return seconds, sum(tensor.nbytes for tensor in bench_overlap.tensors_of(state))
