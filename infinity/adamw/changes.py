"""Changes of weights and state: each made whole, one after the other.

An interrupt (Ctrl-C) comes up in the main thread at any line. Between a kernel and the line that
takes note of it, it would have that part of the update done twice; between two tables that belong
together, it would leave one of them behind. So every change is made where no signal handler runs,
and the main thread waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from checkpoint.sheltered import Cancellation, sheltered
from swap import forks
from swap.processors import stay_in_background

T = TypeVar("T")


class Changes:
    """The changes of one optimizer; a change cannot make another one."""

    def __init__(self) -> None:
        # Taken by who makes a change, never by a main thread: no interrupt leaves it locked.
        self._turn = threading.Lock()
        self._maker: int | None = None  # the thread whose turn it is
        self._was_cut = False
        forks.note(self)

    def make(self, change: Callable[[], T], devices: Iterable[torch.device] = ()) -> T:
        """Returns or raises what ``change`` does. Work that it queues on GPUs among ``devices``
        is in the order of the streams that the caller has there.

        An interrupt is raised when the change has ended, or was not begun, however many come.
        Raises ``OSError`` (EAGAIN) where there is no thread to be had, and ``RuntimeError`` from
        within a change.
        """
        self._check_not_cut()
        self._check_not_within()
        streams = [torch.cuda.current_stream(d) for d in devices if d.type == "cuda"]
        caller, threads = threading.get_ident(), torch.get_num_threads()

        def make(_: Cancellation) -> T:
            if threading.get_ident() != caller:
                stay_in_background(threads)
                for stream in streams:
                    torch.cuda.set_stream(stream)
            with self._turn, torch.no_grad():
                self._maker = threading.get_ident()
                try:
                    return change()
                finally:
                    self._maker = None

        return sheltered(make, "infinity-adamw")

    def wait(self) -> None:
        """Wait for a change that another thread makes."""
        self._check_not_cut()
        if self._turn.locked():
            self.make(lambda: None)

    def after_fork(self) -> None:
        self._was_cut = self._was_cut or self._turn.locked()
        self._turn = threading.Lock()
        self._maker = None

    def _check_not_within(self) -> None:
        """It would wait for itself for ever."""
        if self._maker == threading.get_ident():
            raise RuntimeError(
                "a tensor or a mapping that the optimizer was given asks it for its state while "
                "that is changed; give it plain tensors"
            )

    def _check_not_cut(self) -> None:
        if self._was_cut:
            raise RuntimeError(
                "this process was forked while the optimizer changed weights or state, and has "
                "half of that change; fork between steps"
            )
