"""Ctrl-C, pressed while the main thread waits."""

from __future__ import annotations

import _weakrefset
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_SECONDS = 20.0


class Keyboard:
    """Ctrl-C, pressed from another thread; ``press`` returns when its handler is at work."""

    def __init__(self) -> None:
        self._handled = threading.Semaphore(0)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Nothing is raised where Python swallows it; whoever presses presses again."""
        if any(_is_a_finalizer(part) for part in _stack(frame)):
            return
        self._handled.release()
        raise KeyboardInterrupt

    def press(self, *numbers: signal.Signals) -> None:
        """SIGINT, or these signals at once."""
        sent = numbers or (signal.SIGINT,)
        for number in sent:
            self._send(number)
        for number in sent:
            self._wait(number)

    def _send(self, number: signal.Signals) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)

    def _wait(self, number: signal.Signals) -> None:
        """Python does not see a signal that comes just before a wait begins, and the handler
        passes one that comes into a finalizer; another follows.
        """
        for _ in range(int(PATIENCE_SECONDS)):
            if self._handled.acquire(timeout=1.0):
                return
            self._send(number)
        raise AssertionError(f"{number.name} was not handled")


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_a_finalizer(frame: FrameType) -> bool:
    """As sets of weak references have them, of which Python and torch hold many."""
    code = frame.f_code
    return code.co_name == "__del__" or code.co_filename in (_weakrefset.__file__, weakref.__file__)


@contextmanager
def keyboard_of(*numbers: signal.Signals) -> Iterator[Keyboard]:
    """Its handler is that of these signals. Of what others have run as garbage is collected (as
    hypothesis does), nothing is run: Python swallows an interrupt that comes in there.
    """
    made = Keyboard()
    callbacks, gc.callbacks[:] = [*gc.callbacks], []
    before = {number: signal.signal(number, made.handle) for number in numbers}
    try:
        yield made
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        gc.callbacks[:] = callbacks
