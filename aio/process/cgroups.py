"""Limits of memory and processors that the kernel holds this process to: those of its own control
group and of every group above it, in both versions of the hierarchy. Reads files, changes nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_UNLIMITED = 1 << 60
"""Version 1 writes no limit as some number of this size."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a group may take, and those that it takes and could not give back at once."""

    folder: Path
    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A mounted hierarchy: the group that its mount point shows, and that of the process."""

    mount: Path
    shown: PurePosixPath
    own: PurePosixPath

    def folders(self) -> Iterator[Path]:
        """From the group of this process up to the one that is mounted, as far as they are seen.

        In a container the path of the group may be one of the host's, of which nothing is mounted
        but the group itself.
        """
        inside = self.own.relative_to(self.shown) if self.own.is_relative_to(self.shown) else None
        path = self.mount / (inside or PurePosixPath())
        while path != self.mount:
            if path.is_dir():
                yield path
            path = path.parent
        yield self.mount


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """Names of files of a group, and those of counts in its ``memory.stat``."""

    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]


_MEMORY_FILES = {
    1: _MemoryFiles(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: _MemoryFiles(
        ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
    ),
}


def memory_limits(process: Path = _PROCESS) -> list[MemoryLimit]:
    """Every limit that counts for ``process``, a folder of /proc; those of the innermost first."""
    found = []
    for version, hierarchy in _hierarchies(process, "memory"):
        files = _MEMORY_FILES[version]
        for folder in hierarchy.folders():
            limit = min(
                (value for name in files.limits if (value := _number(folder / name))),
                default=_UNLIMITED,
            )
            usage = _number(folder / files.usage)
            if limit < _UNLIMITED and usage is not None:
                cached = _sum_of(folder / "memory.stat", files.file_pages)
                found.append(MemoryLimit(folder, limit, max(0, usage - cached)))
    return found


def num_processors(process: Path = _PROCESS) -> int:
    """How many threads can run at once: as many as ``process``, a folder of /proc, may use
    processors by the affinity of the caller, and by the time of processors that its control groups
    give it, rounded up.
    """
    usable = len(os.sched_getaffinity(0))
    return min([usable, *(math.ceil(quota) for quota in _processor_quotas(process))])


def _processor_quotas(process: Path) -> Iterator[Fraction]:
    """Seconds of processors for each second, of every group that is limited."""
    for version, hierarchy in _hierarchies(process, "cpu"):
        for folder in hierarchy.folders():
            if version == 2:
                numbers = " ".join(_lines(folder / "cpu.max")).split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                numbers = [text for name in names for text in _lines(folder / name)]
            # Without a limit the quota is "max" in version 2 and -1 in version 1.
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                quota, period = map(int, numbers)
                if quota and period:
                    yield Fraction(quota, period)


def _hierarchies(process: Path, controller: str) -> Iterator[tuple[int, _Hierarchy]]:
    """Those that may limit what ``controller`` counts, with their version."""
    own = _own_groups(process)
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mount, shown = Path(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))
        if kinds[0] == "cgroup2" and "" in own:
            yield 2, _Hierarchy(mount, shown, own[""])
        elif kinds[0] == "cgroup" and controller in kinds[2].split(",") and controller in own:
            yield 1, _Hierarchy(mount, shown, own[controller])


def _own_groups(process: Path) -> dict[str, PurePosixPath]:
    """The group of the process by controller; version 2 has the name ``""``."""
    found = {}
    for line in _lines(process / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return found


def _lines(file: Path) -> list[str]:
    """Names of folders may be any bytes, those of other mounts among them."""
    try:
        return [line for line in os.fsdecode(file.read_bytes()).split("\n") if line]
    except OSError:  # no /proc, or not for us
        return []


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _sum_of(file: Path, names: tuple[str, ...]) -> int:
    counts = dict(line.split(" ", 1) for line in _lines(file) if " " in line)
    return sum(int(counts[name]) for name in names if counts.get(name, "").isdigit())


def _unescaped(field: str) -> str:
    """Blanks are octal in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
