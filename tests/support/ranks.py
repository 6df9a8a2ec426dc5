"""Runs a function in several processes that are the ranks of one gloo group.

The function is named, not passed: each rank imports its module, so nothing has to be pickled. The
processes are forks of one that has imported what all of them need.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import FORKS

TIMEOUT_SECONDS = 20.0
"""How long a rank waits for another."""
_LIMIT_SECONDS = 200.0


class Rank:
    """A process that is one rank; what it prints goes to a file."""

    def __init__(self, rank: int, job: Mapping[str, Any]) -> None:
        self._output = Path(job["folder"]) / f"output-{rank}"
        self._process = FORKS.Process(target=_run, args=(rank, job, self._output))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self, timeout: float) -> tuple[int, str]:
        """Exit code and output; raises ``TimeoutError``."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"a rank has not ended after {timeout} s")
        return code, self._output.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def start_ranks(
    function: Callable[..., Any],
    folder: Path,
    world_size: int,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **arguments: Any,
) -> list[Rank]:
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
    return [Rank(rank, job) for rank in range(world_size)]


def end_ranks(ranks: Sequence[Rank]) -> list[tuple[int, str]]:
    """Exit codes and outputs, when all have ended; kills them if that takes too long."""
    try:
        return [rank.end(_LIMIT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def run_ranks(
    function: Callable[..., Any], folder: Path, world_size: int, **options: Any
) -> list[Any]:
    """Run ``function`` on every rank and give what each returned, a JSON value.

    Raises ``AssertionError`` with the output of ranks that failed.
    """
    outcomes = end_ranks(start_ranks(function, folder, world_size, **options))
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


def _run(rank: int, job: Mapping[str, Any], output: Path) -> None:
    with output.open("w") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    code = 1
    try:
        _main(rank, job)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the destructors of gloo's threads, which may wait for each other.
    os._exit(code)
