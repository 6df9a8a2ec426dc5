"""fio as a contestant: what another program gets from the same files with the same setting."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import State
from checkpoint.bench.systems.raw import part_bytes
from checkpoint.bench.systems.system import Loaded, SaveTimes, System

_ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "posix": "psync"}


class Fio(System):
    """One job per lane and directory, direct I/O, the sync at the end within its time."""

    name = "fio"
    has_tensors = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @staticmethod
    def unavailable_reason() -> str | None:
        return None if shutil.which("fio") else "the program fio is not installed"

    def save(self, state: State, place: Place) -> SaveTimes:
        nbytes, seconds = self._run("write", state, place)
        return SaveTimes(nbytes, seconds, seconds)

    def load(self, state: State, place: Place) -> Loaded:
        nbytes, seconds = self._run("read", state, place)
        return Loaded(nbytes, seconds, None)

    def _run(self, kind: str, state: State, place: Place) -> tuple[int, float]:
        done = subprocess.run(
            self.command(kind, state.nbytes, place), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"fio ended with {done.returncode}: {done.stderr.strip()}")
        return bytes_and_seconds(kind, done.stdout)

    def command(self, kind: str, nbytes: int, place: Place) -> list[str]:
        """What is run; with several lanes a directory's file is divided among as many jobs."""
        with self.setting.engine(len(place.folders)) as engine:
            backend, lanes = engine.describe().backend, engine.lanes
        jobs = max(lanes // len(place.folders), 1)
        part = part_bytes(nbytes, len(place.folders))
        share = max(part // jobs // self.setting.block_bytes, 1) * self.setting.block_bytes
        # A thread pool keeps `queue_depth` calls going; psync keeps one a job.
        depth = self.setting.queue_depth
        if backend == "posix":
            jobs, share, depth = jobs * depth, max(share // depth, self.setting.block_bytes), 1
        command = [
            *("fio", "--output-format=json", f"--rw={kind}", "--direct=1", "--thread"),
            *(f"--ioengine={_ENGINES[backend]}", f"--iodepth={depth}"),
            *(f"--bs={self.setting.block_bytes}", f"--size={share}", f"--numjobs={jobs}"),
            *("--end_fsync=1", "--fallocate=posix", "--invalidate=0", "--group_reporting=0"),
            f"--offset_increment={share}",
        ]
        for number, folder in enumerate(place.folders):
            command += [f"--name=job{number}", f"--filename={folder / 'fio'}"]
        return command


def bytes_and_seconds(kind: str, output: str) -> tuple[int, float]:
    """What all jobs moved and how long the slowest one took, from fio's JSON."""
    report: Any = json.loads(output[output.index("{") :])
    jobs = [job[kind] for job in report["jobs"]]
    milliseconds = max(int(job["runtime"]) for job in jobs)
    return sum(int(job["io_bytes"]) for job in jobs), max(milliseconds, 1) / 1000
