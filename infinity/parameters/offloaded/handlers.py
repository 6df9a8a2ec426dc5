"""What handlers of signals may not call where they broke into the library.

Python runs a handler on the main thread between any two of its steps, and a finalizer on whichever
thread frees something. Where that comes in the midst of a hook or a call of ours, the frames that
it broke into hold locks, or are half-way through a change, and go on only when the handler has
returned: a call there that waits for either waits for ever. What a thread is within is told by
Python's own frames, which no interrupt can leave wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import aio
import checkpoint
import swap

F = TypeVar("F", bound=Callable[..., Any])

_AIO, _CHECKPOINT, _SWAP = (
    f"{Path(file).absolute().parent}/"
    for file in (aio.__file__, checkpoint.__file__, swap.__file__)
)
_INFINITY = f"{Path(__file__).absolute().parents[2]}/"
_OURS = (_AIO, _CHECKPOINT, _SWAP, _INFINITY)
_OPEN = tuple(
    _INFINITY + part
    for part in (
        "integrations/",
        "commands/",
        "cli.py",
        "tiling/",
        "optim/optimizer.py",
        "optim/loss_scale.py",
        "parameters/compiled.py",
        "parameters/offloaded/parameter.py",
        "parameters/offloaded/differentiated.py",
    )
)
"""What calls the program back, or the handle, and holds nothing while it does."""
_DOORS = (f"{_INFINITY}model.py", f"{_INFINITY}parameters/offloaded/modes.py")
"""What a public call begins with."""
_MOVES = (_AIO, _SWAP, f"{_INFINITY}autograd/")
"""Where weights and gradients move, and nobody uses a parameter as a program does."""
_MOVES_NOT = (
    f"{_AIO}process/threads.py",
    f"{_SWAP}interruptions/",
    f"{_INFINITY}autograd/modifying.py",
)
PLACES = (*_OURS, *_OPEN, *_DOORS, *_MOVES, *_MOVES_NOT)
"""Every file and folder that is told apart here."""
_is_closed: dict[str, bool] = {}
_is_moving: dict[str, bool] = {}
_open_codes: set[int] = set()


def runs_program(method: F) -> F:
    """For a method that runs code of the program (hooks, closures) and holds nothing meanwhile: a
    call there is none of a handler.
    """
    _open_codes.add(id(method.__code__))
    return method


def check_not_amid(call: str, own: Collection[CodeType] = ()) -> None:
    """Raise ``RuntimeError`` if the public ``call`` that calls this is one of a handler, or of a
    finalizer, that broke into the library on this thread, or of code of the program that is called
    in its midst. ``own`` functions are the call itself.
    """
    if _starts_threads():
        raise RuntimeError(
            f"{call} while this thread starts or lists threads, by the handler of a signal (or a "
            f"finalizer): the threads that it needs could not begin. Set a flag there, and use "
            f"{call} between steps"
        )
    frame = sys._getframe(1).f_back
    while frame is not None and (frame.f_code.co_filename in _DOORS or frame.f_code in own):
        frame = frame.f_back  # the call itself, and what it is wrapped in
    if _is_ours(frame):
        raise _refusal(call, f"use {call}")


def is_amid(own: Collection[CodeType]) -> bool:
    """The same for what has to end without an error, whose ``own`` functions call this: whether
    it must not wait for another thread now.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code in own:
        frame = frame.f_back
    return _starts_threads() or _is_ours(frame)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, is of the library and calls no program."""
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if (closed := _is_closed.get(name)) is None:
            closed = _is_closed[name] = name.startswith(_OURS) and not name.startswith(_OPEN)
        if closed and id(code) not in _open_codes:
            return True
        frame = frame.f_back
    return False


def check_not_moving(name: str) -> None:
    """Raise ``RuntimeError`` naming a parameter, or a gradient, where ``is_moving``."""
    if is_moving():
        raise _refusal(f"a use of {name}", "use it")


def is_moving() -> bool:
    """Whether what calls this is a handler or a finalizer that broke into where weights and
    gradients are moved.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INFINITY):
        frame = frame.f_back  # what serves the use itself
    while frame is not None:
        file = frame.f_code.co_filename
        if (moving := _is_moving.get(file)) is None:
            moving = _is_moving[file] = file.startswith(_MOVES) and not file.startswith(_MOVES_NOT)
        if moving:
            return True
        frame = frame.f_back
    return False


def _refusal(call: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{call} in the midst of a step or a forward pass, or of another hook or call of the "
        "library on this thread, by the handler of a signal (or a finalizer), or by code of the "
        "program that it asks there: it would wait for what it has interrupted. Set "
        f"a flag there, and {remedy} between steps"
    )


def _starts_threads() -> bool:
    """Whoever holds this lock of ``threading`` keeps every new thread from beginning."""
    is_owned = getattr(getattr(threading, "_active_limbo_lock", None), "_is_owned", None)
    return is_owned is not None and bool(is_owned())
