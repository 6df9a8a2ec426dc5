"""Runs a function in several processes that are the ranks of one gloo group.

The function is named, not passed: each rank imports its module, so nothing has to be pickled.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 20.0
"""How long a rank waits for another."""
_LIMIT_SECONDS = 200.0


def start_ranks(
    function: Callable[..., Any],
    folder: Path,
    world_size: int,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **arguments: Any,
) -> list[subprocess.Popen[str]]:
    """Start ``function(rank, folder, **arguments)`` on every rank; the arguments are JSON values.

    Ranks find each other in ``folder``, which is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "module": function.__module__,
        "function": function.__name__,
        "folder": str(folder),
        "world_size": world_size,
        "timeout_seconds": timeout_seconds,
        "arguments": arguments,
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", str(rank), json.dumps(job)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(world_size)
    ]


def end_ranks(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit codes and outputs, when all have ended; kills them if that takes too long."""
    outcomes = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=_LIMIT_SECONDS)
            outcomes.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outcomes


def run_ranks(
    function: Callable[..., Any], folder: Path, world_size: int, **options: Any
) -> list[Any]:
    """Run ``function`` on every rank and give what each returned, a JSON value.

    Raises ``AssertionError`` with the output of ranks that failed.
    """
    processes = start_ranks(function, folder, world_size, **options)
    outcomes = end_ranks(processes)
    failed = [f"rank {r}: {out}" for r, (code, out) in enumerate(outcomes) if code]
    assert not failed, "\n".join(failed)
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(world_size)]


def _main(rank: int, job: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["timeout_seconds"]),
    )
    function = getattr(importlib.import_module(job["module"]), job["function"])
    result = function(rank, folder, **job["arguments"])
    (folder / f"result-{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        _main(int(sys.argv[1]), json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # Not through the destructors of gloo's threads, which may wait for each other.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
