"""Python's cycle collector, kept away from work that only makes objects.

Planning a save or decoding a manifest of ten thousand tensors makes a hundred thousand objects and
no garbage. Each of them counts towards collections that walk everything the process holds, torch's
own objects included, and find nothing: a third of the time, measured.

It is kept away by the number of objects that it waits for. Whether it is enabled at all is the
program's to say, which may do so meanwhile: `gc.disable()` before a CUDA graph is captured stays.

Another thread may see that number and put it back later, as who borrows the thresholds for a time
does. So it is one with which garbage is still found, and the end of the next pause takes it away.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 1_000_003
"""Objects. A million take much longer to make than to walk once; nobody else sets this number."""
_usual = gc.get_threshold()[0]
_here = threading.local()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Of the objects that are made inside, on any thread, a million at a time are walked at most.

    Where several threads are inside at once, it is over for all when it is for the first of them.
    """
    global _usual
    before = gc.get_threshold()[0]
    if getattr(_here, "is_inside", False) or before == 0 or before > _RARELY:
        yield  # it is away already
        return
    if before != _RARELY:
        _usual = before
    try:
        _here.is_inside = True
        gc.set_threshold(_RARELY)
        yield
    finally:
        _resume()
        _here.is_inside = False


def _resume() -> None:
    if gc.get_threshold()[0] == _RARELY:  # what a program has set meanwhile stays
        gc.set_threshold(_usual)


os.register_at_fork(after_in_child=_resume)  # the thread that would do so is not there
