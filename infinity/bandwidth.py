"""How fast a directory reads and writes, by a short measurement with our own engine."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aio import Engine, Request, Slab

_PROBE_BYTES = 256 * 1024 * 1024
_REQUEST_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second."""

    read: float
    write: float

    def __add__(self, other: Bandwidth) -> Bandwidth:
        return Bandwidth(self.read + other.read, self.write + other.write)


def measure_and_keep(directory: str | os.PathLike[str]) -> Bandwidth:
    """Measure ``directory`` and keep the result in it, where ``offload`` looks for it."""
    found = _measure_one(directory)
    file = _kept_file(directory)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"read": found.read, "write": found.write}))
    return found


def kept(directory: str | os.PathLike[str]) -> Bandwidth | None:
    """What ``measure_and_keep`` left in ``directory``; None if it never did.

    Raises ``ValueError`` naming the file if it holds something else.
    """
    file = _kept_file(directory)
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text())
        return Bandwidth(float(values["read"]), float(values["write"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a measurement; run `infinity tune` again") from error


def shares(directories: Sequence[str]) -> list[float] | None:
    """How much of the load each directory takes: by measured bandwidth if all are measured."""
    found = [kept(directory) for directory in directories]
    measured = [entry.read + entry.write for entry in found if entry is not None]
    return measured if len(measured) == len(directories) else None


def _kept_file(directory: str | os.PathLike[str]) -> Path:
    return Path(directory) / ".infinity" / "bandwidth.json"


def measure(directories: Sequence[str | os.PathLike[str]]) -> Bandwidth:
    """The sum over ``directories``, each measured alone: 256 MiB written, synced and read back.

    Raises ``OSError`` naming the directory if that fails. Nothing is left behind.
    """
    total = Bandwidth(0.0, 0.0)
    for directory in directories:
        total += _measure_one(directory)
    return total


def _measure_one(directory: str | os.PathLike[str]) -> Bandwidth:
    with tempfile.TemporaryDirectory(prefix=".infinity-probe-", dir=directory) as folder:
        path = Path(folder) / "probe"
        with Engine() as engine, engine.open(path, "w", size=_PROBE_BYTES) as file:
            buffer = Slab(_REQUEST_BYTES).allocate(_REQUEST_BYTES)
            offsets = range(0, _PROBE_BYTES, _REQUEST_BYTES)
            seconds = {}
            for kind in ("write", "read"):
                start = time.perf_counter()
                requests = [Request(kind, file, offset, buffer) for offset in offsets]
                for operation in engine.submit(requests):
                    operation.result()
                if kind == "write":
                    file.sync()
                seconds[kind] = time.perf_counter() - start
    return Bandwidth(_PROBE_BYTES / seconds["read"], _PROBE_BYTES / seconds["write"])
