"""Ctrl-C at a chosen line of the library, and what must not be left behind.

A signal handler of Python runs in the main thread, between two of its instructions. ``interrupt``
raises ``KeyboardInterrupt`` where the main thread is about to begin its ``number``-th line in one
of our packages, which is the same but that it can be done again.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import finalize

from handler_points import catcher, runs_handler

from tests.support.tiers import Leftovers

_ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{_ROOT / name}/" for name in ("aio", "swap", "checkpoint", "infinity"))
_END_SECONDS = 10.0
"""The most that is waited for what ends by itself: threads, finalizers, transfers for nobody.
Nothing tells of those ends, so they are looked for again and again.
"""
_PARTS = (
    *("infinity/block.py", "infinity/offloading.py", "infinity/restoring.py"),
    "infinity/snapshots/",
    *("checkpoint/saving/", "checkpoint/sheltered.py", "aio/process/threads.py"),
    *("aio/_core.py", "aio/engine.py", "aio/operation.py", "aio/files.py"),
    *("swap/interruptions/", "swap/snapshots/", "swap/storage/", "swap/tiered.py", "swap/update/"),
)
CRITICAL = tuple(f"{_ROOT}/{part}" for part in _PARTS)
"""Entering and leaving a block, publishing saves, snapshots, and the engine's submit and reap."""


class Interrupted(KeyboardInterrupt):
    """The interrupt that was ordered; ``line`` is where it came."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


@dataclass(slots=True)
class Lines:
    """What an action went through: how many lines (or calls), where it was interrupted, if it was,
    and the error, where that was a call.
    """

    seen: int = 0
    line: str = ""
    error: Interrupted | None = None


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


def interrupt_at_instruction(action: Callable[[], object], number: int | None) -> Lines:
    """As ``interrupt``, but in front of instructions, wherever a handler may run: at the beginning
    of a function, behind a call, and where a loop goes back. Only in ``CRITICAL`` parts, whose
    lines others count.
    """
    return _run(action, number, "opcode", _Boundaries(), CRITICAL)


def interrupt_at_call(
    action: Callable[[], object], number: int | None, where: tuple[str, ...] = PACKAGES
) -> Lines:
    """As ``interrupt``, but as functions begin, and as calls of functions in C end: the call is
    what raises, as it is where a handler runs behind it. In files whose paths begin with one of
    ``where``; not as an ``__exit__`` begins, which Python does not make good (see the docs).
    """
    lines = Lines()

    def profiled(frame: FrameType, event: str, argument: Any) -> None:
        is_there = frame.f_code.co_filename.startswith(where)
        if event in ("call", "c_return") and is_there and _may_raise(frame, event, argument):
            lines.seen += 1
            if lines.seen - 1 == number:
                lines.line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise Interrupted(lines.line)

    before = sys.getprofile()
    try:
        sys.setprofile(profiled)
        action()
    except Interrupted as error:
        assert lines.line
        lines.error = error
    finally:
        sys.setprofile(before)
    return lines


def _run(
    action: Callable[[], object],
    number: int | None,
    kind: str,
    counts: Callable[[FrameType], bool],
    where: tuple[str, ...] = PACKAGES,
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
        is_ours = frame.f_code.co_filename.startswith(where)
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


def _may_raise(frame: FrameType, event: str, function: Any) -> bool:
    """Not where a generator is closed, be it by what stops early: Python swallows what comes up."""
    code = frame.f_code
    is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
    if (is_generator and code.co_name == "<genexpr>") or function in (any, all):
        return False
    begins = event == "call" and not is_generator
    is_point = event == "c_return" or (begins and code.co_name != "__exit__")
    return is_point and not _in_finalizer(frame)


def _is_behind_call(frame: FrameType) -> bool:
    """What a handler raises there is raised by the call: not counted is where other code would
    catch it, as behind the last call in a ``with``.
    """
    code, at = frame.f_code, frame.f_lasti - 2
    while at > 0 and dis.opname[code.co_code[at]] == "CACHE":
        at -= 2
    is_behind = at >= 0 and dis.opname[code.co_code[at]] in ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
    return is_behind and catcher(code, at) == catcher(code, frame.f_lasti)


_JUMPS = [f"POP_JUMP_BACKWARD_IF_{what}" for what in ("TRUE", "FALSE", "NONE", "NOT_NONE")]
_OPENS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", *_JUMPS}
"""Behind these instructions Python looks whether a signal has come."""


class _Boundaries:
    """Tells where a frame is about to go on behind one of these. What a handler raises there is
    raised by that instruction: not counted is where other code would catch it.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[CodeType, int]] = {}

    def __call__(self, frame: FrameType) -> bool:
        code, at = frame.f_code, frame.f_lasti
        last_code, before = self._last.get(id(frame), (None, 0))
        self._last[id(frame)] = code, at
        if last_code is not code or not runs_handler(frame):
            return False
        is_open = dis.opname[code.co_code[before]] in _OPENS
        return is_open and catcher(code, before) == catcher(code, at)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Python itself swallows what is raised in there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code is finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, slots=True)
class Remains:
    """Descriptors, files and threads: equal before and after."""

    leftovers: Leftovers
    threads: frozenset[str]

    @classmethod
    def of(cls, *roots: Path, wanted: Remains | None = None) -> Remains:
        """What there is once threads that are about to end have ended, and finalizers, which run on
        threads without a name: with ``wanted``, once that is all there is, or it never will be;
        else once nothing changes any more.
        """
        before: Remains | None = None
        gc.collect()
        deadline = time.monotonic() + _END_SECONDS
        while True:
            # One that an interrupt kept from being waited for may not even have begun.
            while (names := _own_threads()) and time.monotonic() < deadline:
                time.sleep(0.001)
            gc.collect()
            found = cls(Leftovers.of(*roots), names)
            if found in (wanted, before) or time.monotonic() > deadline:
                return found
            before = found if wanted is None else None
            time.sleep(0.01)


def at_rest(counts: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Bytes of activations; what nobody needs goes when the disk is done with it."""
    deadline = time.monotonic() + _END_SECONDS
    while any((found := counts() | {"in host, peak": 0}).values()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def _own_threads() -> frozenset[str]:
    """Those of Python and of C."""
    ours: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended since
            ours += [name for name in [(task / "comm").read_text().strip()] if name[:4] == "aio-"]
    python = [t.name for t in threading.enumerate() if t.name.startswith(("aio-", "infinity-"))]
    return frozenset([*ours, *python])


def sampled(total: int, wanted: int, seed: int = 0) -> range:
    """About ``wanted`` of ``total`` lines, evenly spread; another ``seed``, other lines."""
    stride = max(1, total // wanted)
    return range(seed % stride, total, stride)
