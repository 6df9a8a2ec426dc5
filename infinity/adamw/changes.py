"""Changes of weights and state: each made whole, one after the other.

An interrupt (Ctrl-C) comes up in the main thread at any line. Between a kernel and the line that
takes note of it, it would have that part of the update done twice; between two tables that belong
together, it would leave one of them behind. So every change is made where no signal handler runs,
and the main thread waits for its end.

What streams values out or in takes longer than an interrupt can wait, so it is no change: it
*holds* them, from a change at its beginning on. While values are read under a hold nobody alters
them, others may read them too; while they are loaded under one, nobody else does either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from aio.process.threads import Latch
from checkpoint.sheltered import Cancellation, sheltered
from swap.interruptions import forks
from swap.processors import stay_in_background

T = TypeVar("T")

_LOOK_SECONDS = 0.1
"""How often one who waits for a hold looks whether he was interrupted."""


class Hold:
    """Values are streamed by the thread that made this, until ``ended``; in with ``is_loading``."""

    def __init__(self, *, is_loading: bool) -> None:
        self.is_loading = is_loading
        self.thread = threading.get_ident()
        self.ended = Latch()


class Changes:
    """The changes of one optimizer; a change cannot make another one."""

    def __init__(self) -> None:
        # Taken by who makes a change, never by a main thread: no interrupt leaves it locked.
        self._turn = threading.Lock()
        self._maker: int | None = None  # the thread whose turn it is
        self._was_cut = False
        self._is_over = False
        self._holds: list[Hold] = []  # changed by whose turn it is
        self._waiting: list[Latch] = []  # of changes that a hold keeps from their turn
        forks.note(self)

    def make(
        self,
        change: Callable[[], T],
        devices: Iterable[torch.device] = (),
        *,
        alters: bool = True,
        is_last: bool = False,
    ) -> T:
        """Returns or raises what ``change`` does, when no hold keeps it from its turn. Work that it
        queues on GPUs among ``devices`` is in the order of the streams that the caller has there.
        One that ``alters`` nothing where all is at home and whole need not wait for readers. From
        one that ``is_last`` on, no other one is made.

        An interrupt is raised when the change has ended, or was not begun, however many come.
        Raises ``OSError`` (EAGAIN) where there is no thread to be had, and ``RuntimeError`` from
        within a change, or where the optimizer was closed before the turn came.
        """
        self._check_not_cut()
        self._check_not_within()
        streams = [torch.cuda.current_stream(d) for d in devices if d.type == "cuda"]
        caller, threads = threading.get_ident(), torch.get_num_threads()

        def make(cancellation: Cancellation) -> T:
            if threading.get_ident() != caller:
                stay_in_background(threads)
                for stream in streams:
                    torch.cuda.set_stream(stream)
            self._take_turn(caller, alters, cancellation)
            try:
                self._maker = threading.get_ident()
                if is_last:
                    self._is_over = True
                else:
                    self._check_not_over()
                with torch.no_grad():
                    return change()
            finally:
                self._maker = None
                self._turn.release()

        return sheltered(make, "infinity-adamw")

    def wait(self) -> None:
        """Wait for a change or a loading of another thread."""
        self._check_not_cut()
        if self._turn.locked() or self._in_the_way(threading.get_ident(), alters=False):
            self.make(lambda: None, alters=False)

    def holding(self, hold: Hold, work: Callable[[], T]) -> T:
        """Returns or raises what ``work`` does, which has a change ``begin`` the hold; it ends with
        the work at the latest, however many interrupts come.
        """
        try:
            result = work()
            hold.ended.set()
        except BaseException:
            # Not in a function of its own: where two signals come at once, what the handler of the
            # second raises comes up at the very next call, and that has to be within the inner try.
            while True:
                try:
                    hold.ended.set()
                    break
                except BaseException:  # there is one error on its way, which says so
                    pass
            raise
        return result

    def give_way(self) -> None:
        """Wait for changes that wait for holds, before another hold: one save after the other would
        keep a step waiting for ever. Not for a hold within one of this thread.
        """
        caller = threading.get_ident()
        if not any(hold.thread == caller and not hold.ended.is_set() for hold in self._holds):
            for latch in tuple(self._waiting):
                latch.wait()

    def begin(self, hold: Hold) -> None:
        """Within a change that waited for the holds that are in the way."""
        assert self._maker == threading.get_ident()
        others = [other for other in self._holds if not other.ended.is_set()]
        self._holds = [*others, *(() if hold in others else (hold,))]

    def after_fork(self) -> None:
        self._was_cut = self._was_cut or self._turn.locked()
        self._turn = threading.Lock()
        self._maker = None
        self._holds, self._waiting = [], []

    def _take_turn(self, caller: int, alters: bool, cancellation: Cancellation) -> None:
        """Waits for holds without the turn, which readers need. Raises ``StoppedError``."""
        self._turn.acquire()
        if self._in_the_way(caller, alters=alters) is None:
            return
        self._waiting.append(has_turn := Latch())
        try:
            while (held := self._in_the_way(caller, alters=alters)) is not None:
                self._turn.release()
                self._wait_for(held, caller, cancellation)
                self._turn.acquire()
        finally:
            self._waiting.remove(has_turn)
            has_turn.set()

    def _wait_for(self, held: Hold, caller: int, cancellation: Cancellation) -> None:
        if held.thread == caller:
            raise RuntimeError(
                "the optimizer is to change its state while this very thread saves it (in a signal "
                "handler, or in what is saved): do that when save() has returned"
            )
        while not held.ended.wait(_LOOK_SECONDS):
            cancellation.check()

    def _in_the_way(self, caller: int, *, alters: bool) -> Hold | None:
        """A hold that has not ended, of somebody's loading, or for what alters of any reader."""
        for hold in self._holds:
            is_own_loading = hold.is_loading and hold.thread == caller
            if (alters or hold.is_loading) and not is_own_loading and not hold.ended.is_set():
                return hold
        return None

    def _check_not_within(self) -> None:
        """It would wait for itself for ever."""
        if self._maker == threading.get_ident():
            raise RuntimeError(
                "a tensor or a mapping that the optimizer was given asks it for its state while "
                "that is changed; give it plain tensors"
            )

    def _check_not_over(self) -> None:
        """It may have been closed since somebody looked, by another thread or a closure."""
        if self._is_over:
            raise RuntimeError("the optimizer is closed, and its state is gone")

    def _check_not_cut(self) -> None:
        if self._was_cut:
            raise RuntimeError(
                "this process was forked while the optimizer changed weights or state, and has "
                "half of that change; fork between steps"
            )
