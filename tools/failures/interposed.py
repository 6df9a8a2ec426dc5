"""Makes the n-th call of the C library fail, in a program that was started with `interpose.c`."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

_SOURCE = Path(__file__).with_name("interpose.c")
_BUILD = Path(__file__).parents[2] / "build"
_COMPILE = ("cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror")
_WHAT_BYTES = 512
_NEVER = -1

OPEN, READ, WRITE, SYNC, SPACE, NAME, LOCK, MEMORY, LIST = (1 << bit for bit in range(9))
_REFUSED, _SHORT, _ZERO, _TORN, _KILLED = range(5)
_FILES = OPEN | READ | WRITE | SYNC | SPACE | NAME | LOCK | LIST


@dataclass(frozen=True, slots=True)
class Kind:
    """How a call fails. `calls` are those that can fail so; `lasts`: all that follow fail, too.
    `passes`: it means nothing, and nobody may notice."""

    name: str
    errno: int
    calls: int
    way: int = _REFUSED
    lasts: bool = False
    passes: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("EIO", errno.EIO, _FILES),
        Kind("ENOSPC", errno.ENOSPC, OPEN | WRITE | SYNC | SPACE | NAME),
        Kind("EINTR", errno.EINTR, OPEN | READ | WRITE | SYNC | SPACE | LOCK, passes=True),
        Kind("EAGAIN", errno.EAGAIN, READ | WRITE),
        Kind("ENOMEM", errno.ENOMEM, OPEN | READ | WRITE | LIST | MEMORY),
        Kind("EMFILE", errno.EMFILE, OPEN | LIST),
        Kind("short", 0, READ | WRITE, way=_SHORT, passes=True),
        Kind("zero", 0, READ | WRITE, way=_ZERO),
        Kind("torn", errno.EIO, WRITE, way=_TORN),
        Kind("dead", errno.EIO, _FILES, lasts=True),
        Kind("full", errno.ENOSPC, WRITE | SPACE | NAME, lasts=True),
    )
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of an action: what failed, empty if it made fewer calls than that; and what it raised."""

    failed: str
    calls: int
    error: BaseException | None

    def without_error(self) -> Outcome:
        return replace(self, error=None)


class Interposer:
    """The library that is between this program and the C library, for files below `root`."""

    def __init__(self, root: Path) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.interpose_disarm.restype = ctypes.c_long
        self._root = os.fsencode(root)  # C keeps a copy
        self._library.interpose_root(self._root)

    def attempt(
        self, action: Callable[[], object], kind: Kind, number: int | None = None
    ) -> Outcome:
        """Takes an action of which call `number`, counted from 0, fails; None: none."""
        target = ctypes.c_long(_NEVER if number is None else number)
        failed = ctypes.create_string_buffer(_WHAT_BYTES)
        raised: BaseException | None = None
        self._library.interpose_arm(kind.way, kind.errno, kind.calls, target, int(kind.lasts))
        try:
            action()
        except BaseException as error:
            raised = error
        finally:
            calls = self._library.interpose_disarm(failed)
        return Outcome(os.fsdecode(failed.value), calls, raised)

    def arm_kill(self, number: int) -> None:
        """Have SIGKILL end this program at call `number` from now on, counted from 0: one that is
        about its files, or gives requests to a queue of the kernel.
        """
        self._library.interpose_arm(_KILLED, 0, _FILES, ctypes.c_long(number), 0)


def unavailable_reason() -> str | None:
    """Why nothing can be made to fail here; None if it can."""
    return None if shutil.which(_COMPILE[0]) else "needs a C compiler"


def interposed() -> bool:
    """Whether this program was started as `start_again` does."""
    return str(_library()) in os.environ.get("LD_PRELOAD", "").split(":")


def start_again() -> None:
    """Starts this program from the beginning, with the library in between. Does not return."""
    os.execve(sys.executable, [sys.executable, *sys.argv], environment())


def environment() -> dict[str, str]:
    """That of a program which has the library in between, which is compiled first if need be."""
    library = _library()
    if not library.exists():
        _BUILD.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*_COMPILE, "-o", str(made), str(_SOURCE), "-ldl"], check=True)
        made.replace(library)
    return {**os.environ, "LD_PRELOAD": str(library)}


def _library() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    return _BUILD / f"interpose-{digest}.so"
