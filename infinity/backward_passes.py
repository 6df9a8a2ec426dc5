"""Which backward passes run now: those that bring gradients are to come one at a time.

Autograd tells nobody when a pass begins or ends. It is taken to begin with its first gradient; what
it ends with is a callback that autograd drops together with the pass, whatever becomes of that.

On a CPU a pass runs on the thread that began it, and one on the same thread is within it
(recomputation). Threads of autograd's own work for whichever pass comes: what runs on those is
neither noticed nor refused.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from swap.interruptions.forks import check_process


class BackwardPasses:
    """Those of one model. Thread-safe."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._known: dict[int, weakref.ref[_End]] = {}
        """By what autograd numbers them with."""
        self._alone: dict[FrameType, threading.Thread] = {}
        """By the call that it is run in."""

    def brings(self) -> None:
        """A gradient arrives, of the pass that runs on this thread.

        Raises ``RuntimeError`` if one is under way on another, and in a forked child.
        """
        check_process(self._process, "the offloaded model")
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._known:
            return
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):
            return
        with self._lock:
            self._check(thread)
            end = _End(thread)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(end)
            self._known[number] = weakref.ref(end)

    @contextmanager
    def alone(self, call: FrameType) -> Iterator[None]:
        """A pass is run inside, in ``call``, from its beginning to its end, or something that
        none may run beside. Raises as ``brings``.
        """
        thread = threading.current_thread()
        try:
            with self._lock:
                self._check(thread)
                self._alone[call] = thread
            yield
        finally:
            self._alone.pop(call, None)

    def _check(self, thread: threading.Thread) -> None:
        for number, end in [*self._known.items()]:
            if (found := end()) is None or found.has_come:
                del self._known[number]
        for call in [*self._alone]:
            if has_ended(call):  # an interrupt kept it from being taken off
                self._alone.pop(call, None)
        ends = [end() for end in self._known.values()]
        for other in [*self._alone.values(), *(end.thread for end in ends if end is not None)]:
            if other is not thread:
                raise RuntimeError(
                    f"backward passes of an offloaded model, or load() or restore() beside one, "
                    f"run on two threads at once, {other.name} and {thread.name}: what gradients "
                    "are added up to would be a matter of chance; begin one when the other has "
                    "ended (forward passes may overlap)"
                )


def has_ended(call: FrameType) -> bool:
    """Also for a frame of another thread. Python itself tells, and it alone, since it refuses to
    clear what runs; what has ended loses its variables, which nobody misses.
    """
    try:
        call.clear()
    except RuntimeError:
        return False
    return True


def threads_alive() -> set[int]:
    """Idents of the threads that run Python now. Unlike ``threading.enumerate`` it takes no lock: a
    handler that came while the main thread has that one would keep every new thread waiting.
    """
    return {*sys._current_frames()}


class _End:
    """Kept by autograd alone, for as long as a pass runs; called when it has succeeded."""

    __slots__ = ("__weakref__", "has_come", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.has_come = False

    def __call__(self) -> None:
        self.has_come = True
