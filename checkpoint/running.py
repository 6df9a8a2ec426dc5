"""A save from its order to its end, on a thread of its own where no signal handler runs.

The caller waits: for all of it (`save`), until the tensors may change (`save_async`), or until all
is planned and held back (`save_async` with a guard). If an interrupt ends that waiting, the save is
stopped and everything that it made removed, or it is done if it had got so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aio import Engine
from checkpoint.commit import SavePlan, commit
from checkpoint.commit_ranks import commit_ranks, numbers_of
from checkpoint.coordinator import Coordinator
from checkpoint.directory_lock import end_given_up
from checkpoint.early import EarlyStage
from checkpoint.guard import Gate
from checkpoint.memory import machine
from checkpoint.pending import PendingSave, settle
from checkpoint.records import Manifest, SaveInfo
from checkpoint.sheltered import Cancellation, StoppedError, Worker, wait_for
from checkpoint.threads import started


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be saved and how. `early` takes the memory for a copy, on a machine with so many
    ranks; without it the tensors are read as they are written. `gate` is that of the guard.
    `previous` is a save that this one belongs with. `plan` and `early` are called on the thread of
    the save.
    """

    path: Path
    ranks: Coordinator
    engine: Engine | None
    plan: Callable[[Cancellation], SavePlan]
    early: Callable[[SavePlan, int], EarlyStage] | None = None
    gate: Gate | None = None
    previous: PendingSave | None = None
    on_committed: Callable[[Manifest], None] | None = None


def save_now(order: Order) -> SaveInfo:
    """Carries an order out. Raises what `save` does."""
    end_given_up(order.path)
    pending = PendingSave(order.path)
    worker = Worker(partial(_carry_out, order, pending, False), "checkpoint-save")
    wait_for(worker, worker.ended)
    return pending.result()


def save_behind(order: Order, after: Callable[[], None] | None) -> PendingSave:
    """Carries an order out in the background. Returns when the tensors may change or their guard is
    held back. Raises what `save_async` does.
    """
    end_given_up(order.path)
    pending = PendingSave(order.path, after)
    worker = Worker(partial(_carry_out, order, pending, True), "checkpoint-save")
    wait_for(worker, pending.has_begun if order.early is None else pending.has_staged)
    pending.check_begun()
    return pending


def _carry_out(
    order: Order, pending: PendingSave, is_background: bool, cancellation: Cancellation
) -> None:
    started = time.perf_counter()
    early = None
    outcome: SaveInfo | BaseException
    try:
        with ExitStack() as turn:
            order.ranks.begin()
            turn.callback(order.ranks.end)
            plan = order.plan(cancellation)
            sharing = _settle(order, cancellation)
            early = None if order.early is None else order.early(plan, sharing)
            if is_background:
                if order.gate is not None:
                    order.gate.add(pending)
                pending.begin()
            numbers = _write(order, plan, early, pending)
        outcome = SaveInfo(
            path=plan.path,
            uuid=plan.destination.uuid,
            **numbers,
            seconds=time.perf_counter() - started,
        )
    except BaseException as error:
        outcome = error
    if early is not None:
        early.close()
    # Whoever was interrupted knows.
    pending.finish(outcome, is_told=not is_background or cancellation.is_requested)


def _settle(order: Order, cancellation: Cancellation) -> int:
    """`settle`; an error that one rank has not been told yet ends the save on all of them. Gives
    how many ranks are on this machine.
    """
    try:
        settle(order.path, cancellation, order.previous)
    except BaseException as error:
        order.ranks.exchange(error)
        raise
    return order.ranks.exchange(machine()).count(machine())


def _write(
    order: Order, plan: SavePlan, early: EarlyStage | None, pending: PendingSave
) -> dict[str, int]:
    if early is None:

        def staged() -> None:
            plan.versions.check()
            pending.set_staged()

        return _commit(order, plan, staged, None)
    if early.is_whole:
        # Nobody waits for the writing yet; it would take cores and bandwidth from the copy.
        early.copy()
        early.check_copied()
        pending.set_staged()
        return _commit(order, plan, early.check_copied, early)
    with _Copying(early, pending):
        return _commit(order, plan, early.check_copied, early)


class _Copying:
    """Copies in waves beside the writing."""

    def __init__(self, early: EarlyStage, pending: PendingSave) -> None:
        self._early = early
        self._pending = pending

    def _copy(self) -> None:
        if self._early.copy():
            self._pending.set_staged()

    def __enter__(self) -> None:
        self._thread = started(self._copy, "checkpoint-stage")

    def __exit__(self, *_: object) -> None:
        self._early.stop()
        self._thread.join()


def _commit(
    order: Order, plan: SavePlan, staged: Callable[[], None], early: EarlyStage | None
) -> dict[str, int]:
    with ExitStack() as stack:
        engine = order.engine
        if engine is None:
            engine = stack.enter_context(Engine(lanes=plan.destination.num_stripes))
        try:
            if plan.ranks is not None:
                return commit_ranks(plan, engine, order.ranks, staged, early)
            manifest = commit(plan, engine, staged, early)
        except StoppedError:
            if early is not None:
                early.check_copied()  # what the writing was stopped for
            raise
        if order.on_committed is not None:
            order.on_committed(manifest)
        return numbers_of(manifest)
