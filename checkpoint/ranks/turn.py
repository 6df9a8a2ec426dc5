"""A turn of several meetings on the main thread, where an interrupt may come between two of them.

The other ranks are on their way to the next meeting then, and are told there. In a meeting no
handler runs: a rank that left one half way would be at another point than the others for ever.

Invariant: whatever ends a turn is known to every rank, unless it was over: its last meeting was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from aio.process.within import Within, enter
from checkpoint.ranks.coordinator import Coordinator, Operation, amid, is_amid, tell
from checkpoint.sheltered import Cancellation, Worker, wait_for

T = TypeVar("T")


class Turn:
    """The meetings of one operation, see `in_turn`."""

    is_refused = False
    """It never begins: the thread `is_amid`."""
    _has_begun = False
    _is_over = False
    _within: Within | None = None

    def __init__(self, ranks: Coordinator, operation: Operation) -> None:
        self._ranks, self._operation = ranks, operation

    @property
    def _is_alone(self) -> bool:
        """Then no meeting raises an error: the frame that was given it would keep all that it has
        come through until the collector runs.
        """
        return self._ranks.world_size == 1

    def together(
        self, step: Callable[[], T], ends: Callable[[list[T]], bool] = lambda _: False
    ) -> list[T]:
        """As `coordinator.together`. With what `ends` says yes to, no other meeting follows."""
        try:
            value = step()
        except BaseException as error:
            if not self._is_alone:
                self._meet(error)
            raise

        return self._meet(value, ends)

    def apart(self, step: Callable[[], T]) -> T:
        """As `coordinator.apart`, in the last meeting of the turn."""
        given: list[T] = []
        self.together(lambda: given.append(step()), ends=lambda _: True)
        return given[0]

    def same(self, step: Callable[[], T], what: str) -> None:
        """As `together`, for what has to be the same on all ranks. Raises ValueError on each of
        them where it is not: `what` is told of that of rank 0, a rank, and that of the rank.
        """
        every = self.together(step, lambda found: any(one != found[0] for one in found))
        for rank, one in enumerate(every):
            if one != every[0]:
                raise ValueError("rank 0 " + what.format(every[0], rank, one))

    def begin(self) -> None:
        """Waits for the coordinator."""

        def begin(cancellation: Cancellation) -> None:
            self._ranks.begin(self._operation)
            self._has_begun = True
            if cancellation.is_requested:  # nobody may wait for this any more
                self._end()

        self._within = enter(self._ranks)
        self._run(begin)

    def end(self) -> None:
        """Lets the next one use the coordinator. To be called again after an interrupt."""
        if self._has_begun:
            self._run(lambda _: self._end())
        if self._within is not None:
            self._within.ends()

    def _end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._ranks.end()

    def tell(self, error: BaseException) -> None:
        """Lets the others know, if they do not and there is a meeting to come."""
        if self._is_over or self._is_alone:
            return
        if self._has_begun:
            self._meet(error)
        else:
            tell(self._ranks, self._operation, error)

    def _meet(
        self, value: T | BaseException, ends: Callable[[list[T]], bool] = lambda _: False
    ) -> list[T]:
        def meet(_: object) -> list[T]:
            try:
                answers = self._ranks.exchange(value)
            except BaseException:
                self._is_over = True  # all raise
                raise
            self._is_over = self._is_over or ends(answers)
            return answers

        return self._run(meet)

    def _run(self, work: Callable[[Cancellation], T]) -> T:
        """Where no handler runs. A second interrupt ends the waiting for others, which may be long;
        then the ranks cannot meet any more.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._is_alone:
            return work(Cancellation())
        worker = Worker(work, "checkpoint-meet")
        try:
            wait_for(worker, worker.ended)
        except BaseException:
            worker.withdraw()  # should it not have begun
            if not worker.ended.is_set():
                self._is_over = True
            raise
        return worker.outcome()


def in_turn(ranks: Coordinator, operation: Operation, look: Callable[[Turn], T]) -> T:
    """Does what `look` does with the coordinator, which is this operation's meanwhile, on every
    rank.

    A function and no context manager: an interrupt may meet the very call of `__exit__`, or the
    steps of `contextlib` around a generator, and then nothing would be told nor ended.
    """

    def begin_and_look(turn: Turn) -> T:
        turn.begin()
        return look(turn)

    return before_turn(ranks, operation, begin_and_look)


def before_turn(
    ranks: Coordinator,
    operation: Operation,
    look: Callable[[Turn], T],
    tell_before: Callable[[BaseException], None] = lambda _: None,
) -> T:
    """As `in_turn`, for a `look` that does something else with the coordinator on every rank before
    it calls `turn.begin()`. It may fail there, on this rank alone or on all: in either case every
    rank comes to the first meeting of the turn with its error. `tell_before` is called first with
    that, for ranks that are on their way to what comes before.

    Raises RuntimeError where it `is_amid`, of which nobody is told.
    """
    turn = Turn(ranks, operation)
    try:
        try:
            if is_amid(ranks):
                turn.is_refused = True
                raise amid(ranks, operation)
            return look(turn)
        except BaseException as error:
            if not turn.is_refused:
                tell_before(error)
                turn.tell(error)
            raise
        finally:
            turn.end()
    finally:
        turn.end()  # an interrupt may have met the first
