"""SSDs that are always the same: loop devices over files in memory, each held to a byte limit.

    ssd_rig.py up 4 --limit 400MiB --size 3GiB       make them; they stay until `down`
    ssd_rig.py run -- ckpt-bench --dir={}            a command that is held to the limit
    ssd_rig.py run --count 2 -- ckpt-bench --dir={}  SSDs for the time of the command
    ssd_rig.py list
    ssd_rig.py down

Each is an ext4 with direct I/O and kernel AIO on a block device (loop_ssd.py). Only processes that
have joined the rig's cgroup are held to the limit (byte_limit.py, which also says what is counted):
`run` and `Rig.command` make a command join, `Rig.joined` the calling process.

Everything needs root. What a killed run left is found by its names and taken down by the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from byte_limit import ByteLimit, find_byte_limits, find_hierarchy, make_byte_limit
from loop_ssd import PROGRAMS, Ssd, find_ssds, loop_devices, make_ssd, remove_device

MEMORY = Path("/dev/shm")
IMAGES = MEMORY / "infinity-ssd-rig"
MOUNTS = Path(tempfile.gettempdir(), "infinity-ssd-rig")
CGROUP_PREFIX = "infinity-ssd-rig-"
MIN_SIZE_BYTES = 16 << 20
MIN_LIMIT_BYTES = 1 << 20
MAX_COUNT = 32

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_counter = itertools.count()


class RigError(RuntimeError):
    """SSDs cannot be made here, and why; or there is no rig of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Every SSD of a rig: bytes a second, reads and writes each; its size; and when the memory
    for it is taken, as it is written or at once, so that no measurement pays for it.
    """

    limit_bytes: int = 400 << 20
    size_bytes: int = 3 << 30
    preallocate: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < MIN_SIZE_BYTES:
            raise ValueError(f"size_bytes={self.size_bytes} is less than {MIN_SIZE_BYTES}")
        if self.limit_bytes < MIN_LIMIT_BYTES:
            raise ValueError(f"limit_bytes={self.limit_bytes} is less than {MIN_LIMIT_BYTES}")


@dataclass(frozen=True, slots=True)
class Rig:
    """SSDs that are up, and the cgroup in which each of them is limited."""

    name: str
    ssds: tuple[Ssd, ...]
    limit: ByteLimit
    limit_bytes: int

    @property
    def directories(self) -> list[Path]:
        return [ssd.directory for ssd in self.ssds]

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, made to join the cgroup first. See `fill_in` for `{}`."""
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.limit.procs)]
        return [*join, *fill_in(command, self.directories)]

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """The calling process is held to the limit within the block."""
        return self.limit.joined()


def fill_in(command: Sequence[str], directories: Sequence[Path]) -> list[str]:
    """Repeats every argument that holds `{}` for each directory, put in its place."""
    filled = []
    for argument in command:
        if "{}" in argument:
            filled += [argument.replace("{}", str(directory)) for directory in directories]
        else:
            filled.append(argument)
    return filled


def unavailable_reason() -> str | None:
    """Why no SSDs can be made here; None if they can. Makes a small one to know."""
    try:
        with ssd_rig(1, Spec(size_bytes=MIN_SIZE_BYTES)):
            return None
    except RigError as error:
        return str(error)


@contextlib.contextmanager
def ssd_rig(count: int, spec: Spec | None = None) -> Iterator[Rig]:
    """So many SSDs within the block; gone after it with all they hold.

    Raises RigError saying what is missing, ValueError for a count that is not 1 to 32.
    """
    reclaim()
    name = f"run-{os.getpid()}-{next(_counter)}"
    with _registered(name):
        try:
            yield _make(name, count, spec or Spec())
        finally:
            take_down(name)


def bring_up(name: str, count: int, spec: Spec) -> Rig:
    """Makes a rig that stays until `take_down(name)`. Raises as `ssd_rig` does."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"name={name!r} is not made of letters, digits and underscores")
    with _registered(name):
        try:
            rig = _make(name, count, spec)
            (IMAGES / name / "limit").write_text(str(spec.limit_bytes))
        except BaseException:
            take_down(name)
            raise
    return rig


def find_rig(name: str) -> Rig:
    """A rig that `bring_up` made; RigError if there is none."""
    ssds = find_ssds(IMAGES / name)
    limits = _limits(name)
    limit_file = IMAGES / name / "limit"
    if not ssds or not limits or not limit_file.exists():
        raise RigError(f"the rig {name!r} is not up; make it with `ssd_rig.py up`")
    return Rig(name, tuple(ssds), limits[0], int(limit_file.read_text()))


def take_down(name: str) -> None:
    """Removes everything that belongs to a rig, whole or in part. Idempotent.

    Processes in its cgroup go on without a limit. What is still in use disappears with its last
    user. Raises RigError naming what will not go.
    """
    try:
        for device in loop_devices(IMAGES / name):
            remove_device(device)
        for limit in _limits(name):
            limit.remove()
    except OSError as error:
        raise RigError(f"cannot take down the rig {name!r}: {error}") from error
    for folder in (MOUNTS, IMAGES):
        if folder == MOUNTS and (folder / name).is_dir():
            for mount_point in (folder / name).iterdir():
                mount_point.rmdir()  # never what is in it
        shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # other rigs are up
            folder.rmdir()


def reclaim() -> list[str]:
    """Takes down what killed processes left, and returns the names of those rigs."""
    gone = []
    for folder in sorted(IMAGES.glob("run-*")):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), _locked(folder):
            take_down(folder.name)
            gone.append(folder.name)
    return gone


def _limits(name: str) -> list[ByteLimit]:
    wanted = CGROUP_PREFIX + name
    return [limit for limit in find_byte_limits(CGROUP_PREFIX) if limit.path.name == wanted]


@contextlib.contextmanager
def _registered(name: str) -> Iterator[None]:
    """Makes the folder that stands for a rig, locked as long as this process is in the block."""
    _check_machine()
    with contextlib.ExitStack() as stack:
        with _locked(MEMORY, wait=True):
            try:
                (IMAGES / name).mkdir(parents=True)
            except FileExistsError:
                raise RigError(f"the rig {name!r} is up already; take it down first") from None
            stack.enter_context(_locked(IMAGES / name))
        yield


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a folder's lock, which ends with the process. Raises BlockingIOError if it is held."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise RigError("needs root, to make loop devices, to mount them and to limit them")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise RigError(f"needs {program} (packages e2fsprogs, util-linux, mount)")
    if not Path("/dev/loop-control").exists():
        raise RigError("needs loop devices: there is no /dev/loop-control")
    if not MEMORY.is_dir():
        raise RigError(f"needs {MEMORY}, a file system in memory")
    try:
        find_hierarchy()
    except OSError as error:
        raise RigError(f"needs a cgroup that limits devices: {error}") from error


def _make(name: str, count: int, spec: Spec) -> Rig:
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count={count} is not between 1 and {MAX_COUNT}")
    _check_memory(count, spec.size_bytes)
    try:
        limit = make_byte_limit(CGROUP_PREFIX + name)
        ssds = []
        for index in range(count):
            image = IMAGES / name / f"ssd{index}.img"
            directory = MOUNTS / name / f"ssd{index}"
            ssd = make_ssd(image, directory, spec.size_bytes, preallocate=spec.preallocate)
            limit.limit_device(ssd.number, spec.limit_bytes)
            ssds.append(ssd)
    except OSError as error:
        raise RigError(f"cannot make the rig {name!r}: {error}") from error
    return Rig(name, tuple(ssds), limit, spec.limit_bytes)


def _check_memory(count: int, size_bytes: int) -> None:
    meminfo = Path("/proc/meminfo").read_text()
    available = re.search(r"MemAvailable: +(\d+) kB", meminfo)
    assert available is not None
    free = min(shutil.disk_usage(MEMORY).free, int(available[1]) << 10)
    if count * size_bytes > free:
        raise RigError(
            f"{count} SSDs of {size_bytes} bytes may come to hold {count * size_bytes} bytes of "
            f"memory, and {free} are free; make fewer or smaller ones"
        )


def parse_size(text: str) -> int:
    """Bytes of "400MiB", "3GiB", "1GB" or a plain number; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 400MiB or 3GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ssd_rig.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="An argument of the command that holds {} is repeated for every SSD.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    default = Spec()
    spec = argparse.ArgumentParser(add_help=False)
    for name, value, text in (
        ("--limit", default.limit_bytes, "bytes a second of each, reads and writes (400MiB)"),
        ("--size", default.size_bytes, "bytes of each (3GiB); memory, once written to"),
    ):
        spec.add_argument(name, type=parse_size, default=value, metavar="SIZE", help=text)
    spec.add_argument("--preallocate", action="store_true", help="take all that memory now")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="default", help="tells several rigs apart")
    up = verbs.add_parser("up", parents=[spec, named], help="make SSDs that stay until `down`")
    up.add_argument("count", type=int)
    verbs.add_parser("down", parents=[named], help="remove them, and orphans of killed runs")
    verbs.add_parser("list", help="show what is up")
    run = verbs.add_parser("run", parents=[spec, named], help="run a command under the limit")
    run.add_argument("--count", type=int, help="make so many SSDs for this command only")
    run.add_argument("command", nargs="+", help="its arguments, after --")
    return parser.parse_args(argv)


def _carry_out(options: argparse.Namespace) -> int:
    if options.verb == "down":
        take_down(options.name)
        reclaim()
        return 0
    if options.verb == "list":
        for folder in sorted(IMAGES.glob("*/limit")):
            _show(find_rig(folder.parent.name))
        return 0
    spec = Spec(limit_bytes=options.limit, size_bytes=options.size, preallocate=options.preallocate)
    if options.verb == "up":
        _show(bring_up(options.name, options.count, spec))
        return 0
    if options.count is None:
        return _wait_for(find_rig(options.name), options.command)
    with ssd_rig(options.count, spec) as rig:
        return _wait_for(rig, options.command)


def _show(rig: Rig) -> None:
    for ssd in rig.ssds:
        free = shutil.disk_usage(ssd.directory).free
        limit = f"{rig.limit_bytes} bytes/s"
        print(f"{rig.name}: {ssd.directory} on {ssd.device}, {limit}, {free} bytes free")


def _wait_for(rig: Rig, command: Sequence[str]) -> int:
    child = subprocess.Popen(rig.command(command))
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise


def _end(number: int, _: Any) -> NoReturn:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # taking down is not to be interrupted
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns what the command returned, or 1 with the reason on stderr."""
    options = _arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        return _carry_out(options)
    except (RigError, ValueError, OSError) as error:
        print(f"ssd_rig: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
