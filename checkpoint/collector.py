"""Python's cycle collector, kept away from work that only makes objects.

Planning a save or decoding a manifest of ten thousand tensors makes a hundred thousand objects and
no garbage. Each of them counts towards collections that walk everything the process holds, torch's
own objects included, and find nothing: a third of the time, measured.

It is kept away by the number of objects that it waits for. Whether it is enabled at all is the
program's to say, which may do so meanwhile: `gc.disable()` before a CUDA graph is captured stays.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = (1 << 31) - 1
_usual = gc.get_threshold()


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection begins inside, on any thread, unless somebody else asks for one.

    Where several threads are inside at once, it is over for all when it is for the first of them.
    """
    global _usual
    before = gc.get_threshold()
    if before[0] == _NEVER:
        yield
        return
    _usual = before
    try:
        gc.set_threshold(_NEVER)
        yield
    finally:
        _resume()


def _resume() -> None:
    if gc.get_threshold()[0] == _NEVER:  # what a program has set meanwhile stays
        gc.set_threshold(_usual[0])


os.register_at_fork(after_in_child=_resume)  # the thread that would do so is not there
