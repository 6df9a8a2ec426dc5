"""A cgroup that limits the bytes a second of its processes on chosen block devices.

Cgroup v1 does it with `blkio.throttle.{read,write}_bps_device`, v2 with `io.max`. A process joins
with all its threads, and what it starts is in the cgroup too.

Version 1 counts I/O for the process that hands it to the block layer. So direct I/O is held to the
limit, and so is what a process writes back in its own `fsync`; pages that the kernel writes back on
its own are not. Version 2 counts them for the process that made them dirty.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

_MOUNTINFO = Path("/proc/self/mountinfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_V1_FILES = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo, as far as anybody here needs it."""

    path: Path
    kind: str
    source: str
    options: tuple[str, ...]


def mounts() -> list[Mount]:
    """Everything mounted where this process looks from, the oldest first."""
    found = []
    for line in _MOUNTINFO.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source, options = after.split(" ", 2)
        path = before.split(" ")[4].encode().decode("unicode_escape")  # a space is \040 there
        found.append(Mount(Path(path), kind, source, tuple(options.split(","))))
    return found


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where cgroups are made and how a limit is written into one."""

    version: int
    root: Path
    own_name: str
    """The controller in /proc/self/cgroup; "" stands for version 2."""


def find_hierarchy() -> Hierarchy:
    """The hierarchy that can limit block devices here; OSError with the reason if none can."""
    unified = None
    for mount in mounts():
        if mount.kind == "cgroup" and "blkio" in mount.options:
            if all((mount.path / name).exists() for name in _V1_FILES):
                return Hierarchy(1, mount.path, "blkio")
            raise OSError(f"{mount.path} has no {_V1_FILES[0]}: a kernel without blk-throttle")
        if mount.kind == "cgroup2":
            unified = mount.path
    if unified is None:
        raise OSError("no cgroup hierarchy is mounted")
    if "io" not in (unified / "cgroup.controllers").read_text().split():
        raise OSError(f"{unified} has no io controller, and there is no blkio of cgroup v1")
    control = unified / "cgroup.subtree_control"
    if "io" not in control.read_text().split():
        try:
            control.write_text("+io")
        except OSError as error:
            raise OSError(f"cannot switch on the io controller in {control}: {error}") from error
    return Hierarchy(2, unified, "")


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """One cgroup. It limits nothing until `limit_device` is called."""

    hierarchy: Hierarchy
    path: Path

    @property
    def procs(self) -> Path:
        """Writing a process id here makes that process join."""
        return self.path / "cgroup.procs"

    def limit_device(self, device: str, bytes_per_second: int) -> None:
        """Limits reads and writes each, on the device "major:minor". Raises OSError."""
        for name, line in limit_lines(self.hierarchy.version, device, bytes_per_second):
            (self.path / name).write_text(line)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """This process is in the cgroup within the block, every thread of it, and returns after."""
        home = _own_cgroup(self.hierarchy)
        self.procs.write_text(str(os.getpid()))
        try:
            yield
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Puts the processes in it back under the root, without a limit, and removes it.

        Idempotent. Raises OSError if it stays busy.
        """
        retry(self._try_to_remove, times=50)

    def _try_to_remove(self) -> None:
        if not self.path.exists():
            return
        for pid in self.procs.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self.hierarchy.root / "cgroup.procs").write_text(pid)
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()


def make_byte_limit(name: str) -> ByteLimit:
    """A new cgroup of this name right under the root. Raises OSError saying why it cannot be."""
    hierarchy = find_hierarchy()
    path = hierarchy.root / name
    path.mkdir()
    return ByteLimit(hierarchy, path)


def find_byte_limits(prefix: str) -> list[ByteLimit]:
    """The cgroups under the root whose names begin with `prefix`."""
    try:
        hierarchy = find_hierarchy()
    except OSError:
        return []
    return [ByteLimit(hierarchy, path) for path in sorted(hierarchy.root.glob(f"{prefix}*"))]


def limit_lines(version: int, device: str, bytes_per_second: int) -> list[tuple[str, str]]:
    """File names and what to write into them, to limit one device."""
    if version == 1:
        return [(name, f"{device} {bytes_per_second}") for name in _V1_FILES]
    return [("io.max", f"{device} rbps={bytes_per_second} wbps={bytes_per_second}")]


def _own_cgroup(hierarchy: Hierarchy) -> Path:
    """Where this process is now; the root if that lies outside of what is mounted here."""
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if hierarchy.own_name in controllers.split(","):
            own = hierarchy.root / path.lstrip("/")
            return own if own.is_dir() else hierarchy.root
    return hierarchy.root


def retry(action: Callable[[], None], *, times: int) -> None:
    """Does what the kernel may refuse for a moment after a process has ended; raises its OSError"""
    moment = Event()
    for remaining in reversed(range(times)):
        try:
            return action()
        except OSError:
            if not remaining:
                raise
            moment.wait(0.02)
