"""A save from its order to its end, on a thread of its own where no signal handler runs.

The caller waits: for all of it (`save`), until the tensors may change (`save_async`), or until all
is planned and held back (`save_async` with a guard). If an interrupt ends that waiting, the save is
stopped and everything that it made removed, or it is done if it had got so far.

Invariant over ranks: a save begins on all of them or on none. What keeps one from beginning is
raised by the call on every rank; what fails once it has begun is that of `result()` on every rank.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aio import Engine
from aio.process.threads import Latch, say, take_turns
from aio.process.within import enter
from checkpoint.directory.lock import end_given_up
from checkpoint.format.records import Manifest, SaveInfo
from checkpoint.ranks.coordinator import Arrival, Coordinator, Operation, apart
from checkpoint.saving.commit import SavePlan, commit
from checkpoint.saving.guard import Gate
from checkpoint.saving.pending import (
    PendingSave,
    is_behind,
    wait_at_exit,
    wait_for_earlier,
    wait_for_place,
)
from checkpoint.sheltered import Cancellation, StoppedError, Worker, wait_for
from checkpoint.tensors.copiers import Copier
from checkpoint.threads import asked, started
from checkpoint.transfer.memory import machine
from checkpoint.transfer.snapshot import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be saved and how. `snapshot` takes the memory for a copy, on a machine with so
    many ranks; without it the tensors are read as they are written. `copier` brings what is on
    devices, and is closed. `gate` is that of the guard.
    `previous` is a save that this one belongs with. `plan`, `snapshot` and `gate` are called on the
    thread of the save. A rank that does not begin, because it finds no thread or is interrupted,
    has an error for its `arrival`: see `accompanied`.

    `on_begun` is given a background save on its thread, before its caller has it. Of a save with a
    guard `when_read` is called on that thread when the tensors may change: the save fails if it
    raises, and nothing is published before it has returned. `on_end` is called there when a
    background save that had begun has ended, with its error if it has one, and before anybody
    knows.
    """

    path: Path
    ranks: Coordinator
    arrival: Arrival
    engine: Engine | None
    copier: Copier
    plan: Callable[[Cancellation, Copier], SavePlan]
    snapshot: Callable[[SavePlan, int], Snapshot] | None = None
    gate: Callable[[], Gate] | None = None
    previous: PendingSave | None = None
    on_committed: Callable[[Manifest], None] | None = None
    on_begun: Callable[[PendingSave], None] = lambda _: None
    when_read: Callable[[], None] = lambda: None
    on_end: Callable[[BaseException | None], None] = lambda _: None


def save_now(order: Order) -> SaveInfo:
    """Carries an order out. Raises what `save` does."""
    pending = PendingSave(order.path)
    worker = Worker(partial(_carry_out, order, pending, False), "checkpoint-save")
    try:
        _start(order, worker, worker.ended)
        return pending.result()
    finally:
        pending.forget()


def save_behind(order: Order, after: Callable[[], None] | None) -> PendingSave:
    """Carries an order out in the background. Returns when the tensors may change or their guard is
    held back. Raises what `save_async` does.
    """
    pending = PendingSave(order.path, after)
    worker = Worker(partial(_carry_out, order, pending, True), "checkpoint-save")
    _start(order, worker, pending.has_begun if order.snapshot is None else pending.has_staged)
    try:
        pending.check_begun()
    except BaseException:
        pending.forget()
        raise
    wait_at_exit(pending, worker)
    return pending


def _start(order: Order, worker: Worker[None], latch: Latch) -> None:
    if asked.by_save and is_behind(order.path):
        what = (
            "another save to this checkpoint is still running, and asks this thread for its bytes"
        )
        raise BlockingIOError(errno.EAGAIN, what, str(order.path))
    end_given_up(order.path)
    wait_for(worker, latch)


def _carry_out(
    order: Order, pending: PendingSave, is_background: bool, cancellation: Cancellation
) -> None:
    """An error that is kept leads to the frames that it came through and to those behind them: that
    of `_outcome` has ended and is let go of, this one forgets what it was to do.
    """
    outcomes = [_outcome(order, pending, is_background, cancellation)]
    del order
    # Whoever was interrupted knows.
    is_told = not is_background or cancellation.is_requested
    try:
        pending.finish(outcomes.pop(), is_told=is_told)
    finally:
        del pending


def _outcome(
    order: Order, pending: PendingSave, is_background: bool, cancellation: Cancellation
) -> SaveInfo | BaseException:
    started = time.perf_counter()
    outcome: SaveInfo | BaseException
    try:
        pending.attended(cancellation)
        if not order.arrival.is_for("meeting"):
            raise StoppedError("interrupted before it began")
        with ExitStack() as turn:
            turn.callback(enter(order.ranks).ends)  # until it has let go of them
            order.ranks.begin(Operation.SAVE)
            turn.callback(order.ranks.end)
            turn.callback(order.copier.close)
            plan = order.plan(cancellation, order.copier)
            num_here = _wait_for_earlier(order, pending if is_background else None, cancellation)
            engine, snapshot = apart(
                order.ranks, lambda: _take(order, plan, num_here, pending, turn)
            )
            if is_background:
                order.on_begun(pending)
                pending.begin()
            numbers = _write(order, plan, engine, snapshot, pending)
        outcome = SaveInfo(
            path=plan.path,
            uuid=plan.destination.uuid,
            **numbers,
            seconds=time.perf_counter() - started,
        )
    except BaseException as error:
        outcome = error
    if pending.has_begun.is_set():
        try:
            order.on_end(outcome if isinstance(outcome, BaseException) else None)
        except BaseException:  # somebody waits for the end
            say(logger.exception, "after the background save to %s", order.path)
    return outcome


def _wait_for_earlier(
    order: Order, background: PendingSave | None, cancellation: Cancellation
) -> int:
    """`wait_for_earlier`; an error that one rank has not been told yet ends the save on all of
    them. Gives how many ranks are on this machine.

    One in the background takes its place, but over ranks: of two saves there each could have that
    of one rank, and wait for that of another for ever.
    """
    try:
        if background is not None and order.ranks.world_size == 1:
            wait_for_place(background, cancellation, order.previous)
        else:
            wait_for_earlier(order.path, cancellation, order.previous)
        here = machine()
    except BaseException as error:
        order.ranks.exchange(error)
        raise
    return order.ranks.exchange(here).count(here)


def _take(
    order: Order, plan: SavePlan, num_here: int, pending: PendingSave, turn: ExitStack
) -> tuple[Engine, Snapshot | None]:
    """What a save needs before it begins; `turn` gives it back."""
    engine = order.engine
    if engine is None:
        engine = turn.enter_context(Engine(lanes=plan.destination.num_stripes))
    snapshot = None if order.snapshot is None else order.snapshot(plan, num_here)
    if snapshot is not None:
        turn.callback(snapshot.close)
    if order.gate is not None:
        order.gate().add(pending)
    return engine, snapshot


def _write(
    order: Order,
    plan: SavePlan,
    engine: Engine,
    snapshot: Snapshot | None,
    pending: PendingSave,
) -> dict[str, int]:
    if snapshot is None:

        def staged() -> None:
            plan.versions.check()
            pending.set_staged()
            order.when_read()

        return _commit(order, plan, engine, staged, None)
    with ExitStack() as stack:

        def copy() -> None:
            if not snapshot.is_whole:
                stack.enter_context(_Copying(snapshot, pending))
                return
            # Nobody waits for the writing yet; it would take cores and bandwidth from the copy.
            snapshot.copy()
            snapshot.check_copied()
            pending.set_staged()

        return _commit(order, plan, engine, snapshot.check_copied, snapshot, copy)


class _Copying:
    """Copies in waves beside the writing."""

    def __init__(self, snapshot: Snapshot, pending: PendingSave) -> None:
        self._snapshot = snapshot
        self._pending = pending

    def _copy(self) -> bool:
        if self._snapshot.copy():
            self._pending.set_staged()
        return False  # no other turn

    def __enter__(self) -> None:
        self._thread = started(partial(take_turns, self._copy), "checkpoint-stage")

    def __exit__(self, *_: object) -> None:
        self._snapshot.stop()
        self._thread.join()


def _commit(
    order: Order,
    plan: SavePlan,
    engine: Engine,
    staged: Callable[[], None],
    snapshot: Snapshot | None,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    committed = commit(plan, engine, order.ranks, staged, snapshot, begin)
    is_alone = order.ranks.world_size == 1
    if is_alone and order.on_committed is not None and committed.manifest is not None:
        order.on_committed(committed.manifest)
    return committed.numbers
