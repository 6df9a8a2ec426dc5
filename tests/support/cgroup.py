"""Runs a command under a limit that the kernel holds: a cgroup of its own, of bytes of memory or of
time of processors.

A limit of memory counts everything the command and its children touch first, page cache included;
the kernel reclaims page cache before it kills. What is killed in here has really needed more.
Works with cgroup v1 (each controller mounted on its own) and v2, as root or wherever the
caller may create a cgroup below its own.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOUNT_V1 = Path("/sys/fs/cgroup/memory")
_CPU_V1 = Path("/sys/fs/cgroup/cpu")
_MOUNT_V2 = Path("/sys/fs/cgroup")
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """How a limited command ended. `peak_bytes` is the cgroup's high-water mark."""

    returncode: int
    peak_bytes: int
    stdout: str
    stderr: str

    @property
    def killed(self) -> bool:
        """True if the command ended by SIGKILL, which is how the kernel enforces the limit."""
        return self.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Files:
    """The parent directory to create cgroups in, and this version's names of the files."""

    parent: Path
    limit: str
    peak: str
    swap_limit: str


def _own_path(controller: str) -> str:
    """The cgroup this process is in, relative to the mount: "" for the v2 hierarchy's name."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _below_mount(mount: Path, controller: str) -> Path:
    own = mount / _own_path(controller)  # in a container this may lie outside of the mount
    return own if (own / "cgroup.procs").exists() else mount


def _find_files() -> _Files:
    """Which hierarchy limits memory here; OSError with the reason if none does."""
    if (_MOUNT_V1 / "memory.limit_in_bytes").exists():
        return _Files(
            parent=_below_mount(_MOUNT_V1, "memory"),
            limit="memory.limit_in_bytes",
            peak="memory.max_usage_in_bytes",
            swap_limit="memory.memsw.limit_in_bytes",
        )
    if not (_MOUNT_V2 / "cgroup.controllers").exists():
        raise OSError("no cgroup hierarchy with a memory controller is mounted")
    for parent in (_below_mount(_MOUNT_V2, ""), _MOUNT_V2):
        if "memory" in (parent / "cgroup.subtree_control").read_text().split():
            return _Files(parent, limit="memory.max", peak="memory.peak", swap_limit="")
    raise OSError("cgroup v2 does not delegate the memory controller to children here")


@contextlib.contextmanager
def _cgroup(limit_bytes: int) -> Iterator[tuple[Path, _Files]]:
    """A fresh cgroup with the limit set; on exit what still runs in it is killed and it is gone."""
    files = _find_files()
    path = files.parent / f"infinity-test-{os.getpid()}-{next(_counter)}"
    path.mkdir()
    try:
        if not (path / files.peak).exists():
            raise OSError(f"this kernel has no {files.peak}")
        (path / files.limit).write_text(str(limit_bytes))
        if files.swap_limit and (path / files.swap_limit).exists():
            (path / files.swap_limit).write_text(str(limit_bytes))
        elif (path / "memory.swap.max").exists():
            (path / "memory.swap.max").write_text("0")
        yield path, files
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Kill what is left in the cgroup and remove it; the kernel needs a moment to bury the dead."""
    moment = threading.Event()
    for _ in range(500):
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        moment.wait(0.01)
    raise OSError(f"cannot remove the cgroup {path}: it is still busy")


@contextlib.contextmanager
def _cpu_cgroup(quota_us: int, period_us: int) -> Iterator[Path]:
    """A fresh cgroup whose processes together get so much time of processors in each period."""
    if (_CPU_V1 / "cpu.shares").exists():
        parent = _below_mount(_CPU_V1, "cpu")
        limits = {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}"}
    else:
        parent = _below_mount(_MOUNT_V2, "")
        limits = {"cpu.max": f"{quota_us} {period_us}"}
    path = parent / f"infinity-test-{os.getpid()}-{next(_counter)}"
    path.mkdir()
    try:
        for name, value in limits.items():
            if not (path / name).exists():
                raise OSError(f"{parent} gives its children no {name}")
            (path / name).write_text(value)
        yield path
    finally:
        _remove(path)


def unavailable_reason() -> str | None:
    """Why `run_limited` cannot work here, for a skip; None if it can."""
    try:
        with _cgroup(1 << 30):
            return None
    except OSError as error:
        return f"no memory cgroup can be made: {error}"


def no_quota_reason() -> str | None:
    """Why `run_with_quota` cannot work here, for a skip; None if it can."""
    try:
        with _cpu_cgroup(100_000, 100_000):
            return None
    except OSError as error:
        return f"no cpu cgroup can be made: {error}"


def run_limited(
    command: Sequence[str],
    limit_bytes: int,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 240.0,
) -> LimitedRun:
    """Run `command` and its children under `limit_bytes` of memory and wait for its end.

    Raises OSError where no cgroup can be made (see `unavailable_reason`) and
    subprocess.TimeoutExpired after `timeout` seconds; everything in the cgroup is killed then.
    """
    with _cgroup(limit_bytes) as (path, files):
        done = subprocess.run(
            _joined(path, command),
            cwd=cwd,
            env=env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
        peak_bytes = int((path / files.peak).read_text())
    return LimitedRun(done.returncode, peak_bytes, done.stdout, done.stderr)


def run_with_quota(command: Sequence[str], quota_us: int, period_us: int) -> str:
    """Run `command` with so much time of processors and give what it prints.

    Raises OSError where no cgroup can be made (see `no_quota_reason`) and
    subprocess.CalledProcessError if it fails.
    """
    with _cpu_cgroup(quota_us, period_us) as path:
        joined = _joined(path, command)
        done = subprocess.run(joined, timeout=240.0, capture_output=True, text=True, check=True)
    return done.stdout


def _joined(path: Path, command: Sequence[str]) -> list[str]:
    """The shell joins before it becomes the command: nothing of the command is uncounted."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(path / "cgroup.procs"), *command]
