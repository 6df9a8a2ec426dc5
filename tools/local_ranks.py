"""Starts a program once for each rank of a gloo group on this machine.

A rank is started as `program rank JSON`, where the JSON is a `Job`; the program calls `joined` with
it and does its part. What a rank prints comes out at once; its result goes through a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank has to know: its number, how many there are, the folder where they meet, how long
    they wait for each other, and the arguments of its work, JSON values.
    """

    rank: int
    world_size: int
    folder: str
    timeout_seconds: float
    arguments: Mapping[str, Any]


def start_ranks(
    program: Path,
    world_size: int,
    folder: Path,
    *,
    timeout_seconds: float = 300.0,
    output: Path | None = None,
    **arguments: Any,
) -> list[Process]:
    """Start all ranks; they meet in `folder`, which is made. With `output`, a folder, each prints
    into `rank-<r>` there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world_size):
        job = Job(
            rank=rank,
            world_size=world_size,
            folder=str(folder),
            timeout_seconds=timeout_seconds,
            arguments=arguments,
        )
        command = [sys.executable, str(program), "rank", json.dumps(asdict(job))]
        if output is None:
            processes.append(subprocess.Popen(command))
            continue
        with (output / f"rank-{rank}").open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    return processes


def run_ranks(program: Path, world_size: int, folder: Path, **options: Any) -> list[Any]:
    """Start all ranks, wait for them, and give what each returned. SystemExit if one failed."""
    processes = start_ranks(program, world_size, folder, **options)
    try:
        codes = [process.wait() for process in processes]
    finally:
        end(processes)
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(world_size)]


def end(processes: Sequence[Process]) -> None:
    """Kill what is still running, and wait for it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def be_rank(text: str, work: Callable[[Job], Any]) -> NoReturn:
    """Be the rank that the JSON `text` describes: join the group, do `work`, leave its result."""
    job = Job(**json.loads(text))
    code = 0
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/store",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_seconds),
        )
        result = work(job)
        (Path(job.folder) / f"result-{job.rank}").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the destructors of gloo's threads, which may wait for each other.
    os._exit(code)
