"""Ctrl-C at a chosen line of the library, and what must not be left behind.

A signal handler of Python runs in the main thread, between two of its instructions. ``interrupt``
raises ``KeyboardInterrupt`` where the main thread is about to begin its ``number``-th line in one
of our packages, which is the same but that it can be done again.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from handler_points import runs_handler

from tests.support.tiers import Leftovers

_ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("aio", "swap", "checkpoint", "infinity"))
_JOIN_SECONDS = 30.0


class Interrupted(KeyboardInterrupt):
    """The interrupt that was ordered; ``line`` is where it came."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


@dataclass(slots=True)
class Lines:
    """What an action went through: how many lines, and where it was interrupted, if it was."""

    seen: int = 0
    line: str = ""


def interrupt(action: Callable[[], object], number: int | None) -> Lines:
    """Run ``action`` with an interrupt at line ``number``, counted from 0; None for none.

    What ``action`` raises is passed on, but for the interrupt itself.
    """
    return _run(action, number, "line", runs_handler)


def interrupt_behind_call(action: Callable[[], object], number: int | None) -> Lines:
    """As ``interrupt``, but behind the calls within lines, counted together: a signal handler may
    run there, with what the call has returned in nobody's hands yet.
    """
    return _run(action, number, "opcode", _is_behind_call)


def _run(
    action: Callable[[], object], number: int | None, kind: str, counts: Callable[[FrameType], bool]
) -> Lines:
    lines = Lines()

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        if event == kind and counts(frame):
            lines.seen += 1
            if lines.seen - 1 == number:
                lines.line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise Interrupted(lines.line)
        return within

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        is_ours = frame.f_code.co_filename.startswith(_PACKAGES)
        if not is_ours or _in_finalizer(frame):
            return None
        frame.f_trace_opcodes = kind == "opcode"
        return within

    before = sys.gettrace()
    sys.settrace(called)
    try:
        action()
    except Interrupted:
        assert lines.line
    finally:
        sys.settrace(before)
    return lines


def _is_behind_call(frame: FrameType) -> bool:
    code, at = frame.f_code.co_code, frame.f_lasti - 2
    while at > 0 and dis.opname[code[at]] == "CACHE":
        at -= 2
    return at >= 0 and dis.opname[code[at]] in ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


def _in_finalizer(frame: FrameType | None) -> bool:
    """Python itself swallows what is raised in there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, slots=True)
class Remains:
    """Descriptors, files and threads: equal before and after."""

    leftovers: Leftovers
    threads: frozenset[str]

    @classmethod
    def of(cls, *roots: Path) -> Remains:
        """What there is once threads that are about to end have ended."""
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith(("aio-", "infinity-")):
                thread.join(_JOIN_SECONDS)
        gc.collect()
        native = (task / "comm" for task in Path("/proc/self/task").iterdir())
        names = [path.read_text().strip() for path in native if path.exists()]
        ours = [name for name in names if name.startswith("aio-")]
        python = [t.name for t in threading.enumerate() if t.name.startswith(("aio-", "infinity-"))]
        return cls(Leftovers.of(*roots), frozenset([*ours, *python]))


def sampled(total: int, wanted: int, seed: int = 0) -> range:
    """About ``wanted`` of ``total`` lines, evenly spread; another ``seed``, other lines."""
    stride = max(1, total // wanted)
    return range(seed % stride, total, stride)
