"""Limits of memory that the kernel holds this process to: those of its own control group and of
every group above it, in both versions of the hierarchy. Reads files, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """A mounted hierarchy: the group that its mount point shows, and the names of its files."""

    mount: Path
    shown: PurePosixPath
    own: PurePosixPath
    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]

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


def memory_limits(process: Path = _PROCESS) -> list[MemoryLimit]:
    """Every limit that counts for ``process``, a folder of /proc; those of the innermost first."""
    found = []
    for hierarchy in _hierarchies(process):
        for folder in hierarchy.folders():
            limit = min(
                (value for name in hierarchy.limits if (value := _number(folder / name))),
                default=_UNLIMITED,
            )
            usage = _number(folder / hierarchy.usage)
            if limit < _UNLIMITED and usage is not None:
                cached = _sum_of(folder / "memory.stat", hierarchy.file_pages)
                found.append(MemoryLimit(folder, limit, max(0, usage - cached)))
    return found


def _hierarchies(process: Path) -> Iterator[_Hierarchy]:
    own = _own_groups(process)
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mount, shown = Path(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))
        if kinds[0] == "cgroup2" and "" in own:
            yield _Hierarchy(
                mount,
                shown,
                own[""],
                ("memory.max", "memory.high"),
                "memory.current",
                ("inactive_file", "active_file"),
            )
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(",") and "memory" in own:
            yield _Hierarchy(
                mount,
                shown,
                own["memory"],
                ("memory.limit_in_bytes",),
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )


def _own_groups(process: Path) -> dict[str, PurePosixPath]:
    """The group of the process by controller; version 2 has the name ``""``."""
    found = {}
    for line in _lines(process / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
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
    return field.encode().decode("unicode_escape") if "\\" in field else field
