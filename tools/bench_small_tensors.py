"""What each of many small tensors costs to save, to load, and to load into live tensors.

Bytes are cheap in a directory in memory: what is left is the work for each tensor. A row is the
best of all rounds, in microseconds a tensor: by the clock, and as processor time of all threads. It
holds the planning of a save and the matching of a live tree as the whole calls do them, and the
manifest as it is decoded before a load.

    python tools/bench_small_tensors.py --dir /dev/shm [--tensors 100000] [--json out.json]

Other programs on the machine show in the clock and less in processor time. Nothing stays in the
directory.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from samples import cpu_name
from ssd_rig import parse_size

import checkpoint
from checkpoint.collector import paused_collector
from checkpoint.format.manifest import MANIFEST_NAME, decode_manifest
from checkpoint.loading.into import check_into
from checkpoint.plan.selection import Selection
from checkpoint.plan.state_plan import plan_files, plan_state

LAYER = 10
"""Tensors of one."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    options = _arguments().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix=".bench-small-", dir=options.dir) as folder:
        result = run(options, Path(folder))
    print(
        f"{options.tensors} tensors of {result['bytes']} bytes, {result['cpu']}; best of "
        f"{options.rounds}, microseconds a tensor"
    )
    for name, (clock, processor) in result["rows"].items():
        print(f"{name:24} {clock:7.2f} by the clock {processor:7.2f} of processor time")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, by name: (by the clock, of processor time)."""
    state = make_state(options.tensors, parse_size(options.size))
    path = folder / "step"
    checkpoint.save(state, path)
    raw = (path / MANIFEST_NAME).read_bytes()
    manifest = decode_manifest(raw)
    work: dict[str, Callable[[], object]] = {
        "save": lambda: checkpoint.save(state, path),
        "  planned": lambda: plan(state),
        "load": lambda: checkpoint.load(path),
        "  its manifest decoded": lambda: decode_manifest(raw),
        "load into live tensors": lambda: checkpoint.load(path, into=state),
        "  matched": lambda: match(manifest, state),
    }
    rows = {name: best(one, options.rounds, options.tensors) for name, one in work.items()}
    return {"cpu": cpu_name(), "bytes": next(iter(state["model"].values())).nbytes, "rows": rows}


def make_state(count: int, nbytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """As a state_dict() has them: by dotted names, in two dimensions."""
    shape = (max(nbytes // 4 // 32, 1), 32)
    names = (f"layers.{i // LAYER}.block.weight{i % LAYER}" for i in range(count))
    return {"model": {name: torch.full(shape, float(i)) for i, name in enumerate(names)}}


@paused_collector()
def plan(state: object) -> object:
    """As a save by one process does, before it touches a disk."""
    planned = plan_state(state)
    return planned, planned.versions(), plan_files(planned, uuid="0" * 8, rank=0, weights=[1.0])


@paused_collector()
def match(manifest: Any, state: object) -> object:
    """As a load into live tensors does, while the first bytes are read."""
    return check_into(manifest, state, Selection(None))


def best(work: Callable[[], object], rounds: int, count: int) -> tuple[float, float]:
    """The least time of a call for each tensor, in microseconds: by the clock, of the processor."""
    clock, processor = [], []
    for _ in range(rounds):
        gc.collect()
        began = time.perf_counter(), time.process_time()
        made = work()
        clock.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
        del made  # what it takes to let go of it is not counted
    return min(clock) / count * 1e6, min(processor) / count * 1e6


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", required=True, help="a directory, best in memory")
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--size", default="4KiB", help="of each tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write all numbers here")
    return parser


if __name__ == "__main__":
    main()
