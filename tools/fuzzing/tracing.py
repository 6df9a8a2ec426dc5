"""Which lines of the packages an input led through, in all threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
_FOLDERS = ("aio", "checkpoint", "infinity", "swap")
_INSIDE = tuple(f"{ROOT / folder}/" for folder in _FOLDERS)
Line = tuple[str, int, int]
"""A file, a line, and the line of that function before it."""


def is_ours(file: str) -> bool:
    """Whether code of the packages is in a file."""
    return file.startswith(_INSIDE)


@contextmanager
def traced(lines: set[Line]) -> Iterator[None]:
    """Adds to `lines` what is run inside, also by threads that are started there."""

    def called(frame: FrameType, _: str, __: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_ours(file):
            return None
        before = frame.f_lineno

        def ran(frame: FrameType, event: str, __: Any) -> Any:
            nonlocal before
            if event == "line":
                lines.add((file, frame.f_lineno, before))
                before = frame.f_lineno
            return ran

        return ran

    threading.settrace(called)
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
