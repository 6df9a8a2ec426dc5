"""The bandwidth of a directory for plain requests of the engine, and a way to limit it.

A step cannot be faster than its bytes at this bandwidth; that is what benchmarks compare with.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from byte_limit import make_byte_limit

from aio import Engine, File, Request, Slab

PROBE_BYTES = 1 << 30
REQUEST_BYTES = 4 << 20
_ALONE_SECONDS = 1.0

Way = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second: reads alone, writes alone, and both together while both go on.

    ``host``: as many would keep all cores of the host busy, with requests, interrupts and, where
    the device is a file in memory, with copying. Told by how much slower something computes beside
    reads and writes; infinite where it is not.
    """

    read: float
    write: float
    both: float
    host: float = float("inf")

    def seconds(self, read_bytes: int, written_bytes: int) -> float:
        """The least time that so much traffic takes."""
        return max(
            read_bytes / self.read,
            written_bytes / self.write,
            (read_bytes + written_bytes) / self.both,
        )


def measure_disk(directories: Sequence[str], *, probe_bytes: int = PROBE_BYTES) -> Bandwidth:
    """Of all directories together, with a lane each way for each of them, direct I/O.

    Files of ``probe_bytes`` are written first, so that no measurement pays for making them.
    """
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(lanes=2 * len(directories)))
        slab = stack.enter_context(Slab(2 * REQUEST_BYTES))
        buffers = {"read": slab.allocate(REQUEST_BYTES), "write": slab.allocate(REQUEST_BYTES)}
        files: dict[Way, list[File]] = {"read": [], "write": []}
        for directory in directories:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            for way, opened in files.items():
                file = engine.open(Path(folder) / way, "w", size=probe_bytes)
                opened.append(stack.enter_context(file))

        def move(*jobs: tuple[Way, Way], beside: _Work | None = None) -> float:
            """Bytes a second of ``(what, on which files)``, all at once; ``beside`` goes on with
            them.
            """
            started = time.perf_counter()
            operations = []
            for way, on in jobs:
                for number, file in enumerate(files[on]):
                    requests = [
                        Request(way, file, offset, buffers[way])
                        for offset in range(0, probe_bytes, REQUEST_BYTES)
                    ]
                    lane = 2 * number + (way == "write")
                    operations += engine.submit(requests, lane=lane)
            if beside is not None:
                beside.run(lambda: all(operation.done() for operation in operations))
            for operation in operations:
                operation.result()
            moved = len(jobs) * len(directories) * probe_bytes
            return moved / (time.perf_counter() - started)

        move(("write", "read"), ("write", "write"))
        work = _Work()
        alone = work.speed_alone()
        found = Bandwidth(
            read=move(("read", "read")),
            write=move(("write", "write")),
            both=move(("read", "read"), ("write", "write")),
        )
        beside = move(("read", "read"), ("write", "write"), beside=work)
        lost = 1.0 - work.speed / alone
        return replace(found, host=beside / lost if lost > 0 else float("inf"))


class _Work:
    """Something that keeps all cores computing: products of matrices, as a model has them."""

    def __init__(self) -> None:
        self._left = torch.ones(512, 1024, dtype=torch.bfloat16)
        self._right = torch.ones(1024, 1024, dtype=torch.bfloat16)
        self.speed = 0.0

    def run(self, is_over: Callable[[], bool]) -> None:
        """Compute until ``is_over``, and keep the products a second in ``speed``."""
        started, products = time.perf_counter(), 0
        while not is_over() or not products:
            torch.mm(self._left, self._right)
            products += 1
        self.speed = products / (time.perf_counter() - started)

    def speed_alone(self) -> float:
        """The products a second with nothing beside them."""
        for _ in range(2):
            self.run(_over_after(_ALONE_SECONDS))
        return self.speed


def _over_after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


@contextlib.contextmanager
def limited(directories: Sequence[str], bytes_per_second: int | None) -> Iterator[None]:
    """This process and its children are held to so much on the disks of the directories, reads
    and writes each; None for no limit. Needs root; raises OSError saying what is missing.
    """
    if bytes_per_second is None:
        yield
        return
    limit = make_byte_limit(f"infinity-disk-limit-{os.getpid()}")
    try:
        for device in {disk_of(directory) for directory in directories}:
            limit.limit_device(device, bytes_per_second)
        with limit.joined():
            yield
    finally:
        limit.remove()


def disk_of(directory: str) -> str:
    """ "major:minor" of the whole disk that a directory is on, also if it is on a partition."""
    number = Path(directory).stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (entry / "partition").exists():
        entry = entry.parent
    return (entry / "dev").read_text().strip()
