"""What a piece is given, what it writes down, and how it reaches the systems that it compares."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_offload import Turns

from gpu_bench.jobs import Job
from gpu_bench.sizes import OFFLOADED_BYTES, SMALL_DEVICE_BYTES, Scale
from gpu_bench.systems import Answer, Request, System, opened

_DISK_PART = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """``deadline``: by ``time.monotonic``; rounds end before it. ``in_process``: systems live in
    this process, which is quick, and their peaks are its own.
    """

    scale: Scale
    device: str
    nvme: list[str]
    deadline: float
    in_process: bool = False

    @property
    def device_bytes(self) -> int:
        """Memory of the device."""
        if self.device == "cpu":
            return SMALL_DEVICE_BYTES
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def host_bytes(self) -> int:
        """Host memory that is free."""
        return int(psutil.virtual_memory().available)

    @property
    def disk_bytes(self) -> int:
        """Space on all disks that swap files may take."""
        devices = {Path(folder).stat().st_dev: folder for folder in self.nvme}
        free = sum(shutil.disk_usage(folder).free for folder in devices.values())
        return int(free * _DISK_PART)

    def depth(self, *, bytes_on_host: int = OFFLOADED_BYTES, uses_disks: bool = False) -> int:
        """Of the model that is compared, see ``Scale.depth_within``."""
        return self.scale.depth_within(
            self.device_bytes,
            self.host_bytes,
            bytes_on_host=bytes_on_host,
            disk_bytes=self.disk_bytes if uses_disks else None,
        )

    def job(self, system: str, *, depth: int, host_memory: int = 0) -> Job:
        """A system that trains a model so deep."""
        scale = self.scale
        return Job(
            system=system,
            nvme=self.nvme,
            width=scale.width,
            depth=depth,
            vocabulary=scale.vocabulary,
            sequence=scale.sequence,
            rows=scale.rows,
            dtype="bfloat16",
            device=self.device,
            clip=1.0,
            host_memory=host_memory,
            device_memory=scale.device_memory,
        )

    @contextmanager
    def systems(self, jobs: Sequence[Job]) -> Iterator[dict[str, System]]:
        """By the names of the jobs' systems; they are there until the end of the block."""
        open_one = opened if self.in_process else _in_process_of_its_own
        with ExitStack() as stack:
            yield {job.system: stack.enter_context(open_one(job)) for job in jobs}

    def has_time_for(self, seconds: float) -> bool:
        """Before the deadline."""
        return time.monotonic() + seconds < self.deadline


class Record:
    """What a piece found so far, in a file that is whole at any time."""

    def __init__(self, path: Path, piece: str) -> None:
        self._path = path
        self._found: dict[str, Any] = {"piece": piece, "complete": False}

    def note(self, **found: Any) -> None:
        """Write this down, too."""
        self._found |= found
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self._found, indent=1))
        beside.replace(self._path)


class _Remote:
    """A system in another process."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def answer(self, request: Request) -> Answer:
        return self._turns.ask(json.dumps(asdict(request)))


@contextmanager
def _in_process_of_its_own(job: Job) -> Iterator[System]:
    with Turns(job, "gpu_systems.py") as turns:
        yield _Remote(turns)
