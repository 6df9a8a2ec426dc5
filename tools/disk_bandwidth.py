"""What a directory gives to plain requests of the engine, and a way to hold it to less.

A step cannot be faster than its bytes at this bandwidth; that is what benchmarks compare with.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from byte_limit import make_byte_limit

from aio import Engine, File, Request, Slab

PROBE_BYTES = 1 << 30
REQUEST_BYTES = 4 << 20

Way = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second: reads alone, writes alone, and both together while both go on."""

    read: float
    write: float
    both: float

    def seconds(self, read_bytes: int, written_bytes: int) -> float:
        """The least time that so much traffic takes."""
        return max(
            read_bytes / self.read,
            written_bytes / self.write,
            (read_bytes + written_bytes) / self.both,
        )


def measure_disk(directories: Sequence[str]) -> Bandwidth:
    """Of all directories together, with a lane each way for each of them, direct I/O.

    Files of ``PROBE_BYTES`` are written first, so that no measurement pays for making them.
    """
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(lanes=2 * len(directories)))
        slab = stack.enter_context(Slab(2 * REQUEST_BYTES))
        buffers = {"read": slab.allocate(REQUEST_BYTES), "write": slab.allocate(REQUEST_BYTES)}
        files: dict[Way, list[File]] = {"read": [], "write": []}
        for directory in directories:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            for way, opened in files.items():
                file = engine.open(Path(folder) / way, "w", size=PROBE_BYTES)
                opened.append(stack.enter_context(file))

        def move(*jobs: tuple[Way, Way]) -> float:
            """Bytes a second of ``(what, on which files)``, all at once."""
            started = time.perf_counter()
            operations = []
            for way, on in jobs:
                for number, file in enumerate(files[on]):
                    requests = [
                        Request(way, file, offset, buffers[way])
                        for offset in range(0, PROBE_BYTES, REQUEST_BYTES)
                    ]
                    lane = 2 * number + (way == "write")
                    operations += engine.submit(requests, lane=lane)
            for operation in operations:
                operation.result()
            moved = len(jobs) * len(directories) * PROBE_BYTES
            return moved / (time.perf_counter() - started)

        move(("write", "read"), ("write", "write"))
        return Bandwidth(
            read=move(("read", "read")),
            write=move(("write", "write")),
            both=move(("read", "read"), ("write", "write")),
        )


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
