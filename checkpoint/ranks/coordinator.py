"""Agreement between the ranks of one save. One process agrees with itself."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol, TypeVar

from aio.process.within import enter, is_within
from checkpoint.sheltered import Worker

T = TypeVar("T")


class Operation(enum.IntEnum):
    """What ranks meet for. One that does something else is told so, whatever the points are."""

    COMPARE = 0
    SAVE = 101
    LOAD = 102
    STEPS = 103
    LATEST = 104
    OWN = 105
    MAKE = 106
    EXPORT = 107


def doing(kind: int) -> str | None:
    """What a rank does at a point of this kind, for messages; None for what is no operation."""
    return _DOING.get(kind)


_DOING: dict[int, str] = {
    Operation.COMPARE: "compares notes",
    Operation.SAVE: "saves a checkpoint",
    Operation.LOAD: "loads a checkpoint",
    Operation.STEPS: "asks for the steps that can be loaded",
    Operation.LATEST: "asks for the latest step",
    Operation.MAKE: "makes a Manager",
    Operation.EXPORT: "exports weights",
    Operation.OWN: "compares what each rank has for itself",
}


class Coordinator(Protocol):
    """What a save needs of its process group. Every rank makes the same calls in the same order.

    With several ranks values are JSON values.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def begin(self, operation: Operation = Operation.COMPARE) -> None:
        """Waits until nothing else of this process uses the coordinator; `end` must follow, on any
        thread. Ranks that meet for another `operation` all raise.
        """
        ...

    def end(self) -> None:
        """Lets the next one use it."""
        ...

    def broadcast(self, value: T) -> T:
        """Gives every rank the value of rank 0."""
        ...

    def exchange(self, value: T | BaseException) -> list[T]:
        """Gives every rank the values of all, by rank.

        If any rank's value is an exception, every rank raises: its own, or one that names the rank.
        """
        ...


class SingleProcess:
    """The coordinator of a save by one process alone."""

    rank = 0
    world_size = 1

    def begin(self, operation: Operation = Operation.COMPARE) -> None:
        """Saves of one process need not wait for each other."""

    def end(self) -> None:
        """See `begin`."""

    def broadcast(self, value: T) -> T:
        return value

    def exchange(self, value: T | BaseException) -> list[T]:
        if isinstance(value, BaseException):
            raise value
        return [value]


def ranks_of(coordinator: Coordinator | None) -> Coordinator:
    """Those of a caller, or this process alone. Raises TypeError for what is no coordinator."""
    if coordinator is None:
        return SingleProcess()
    if not callable(getattr(coordinator, "exchange", None)):
        raise TypeError(
            f"coordinator is a {type(coordinator).__name__}, not a Coordinator; of a process group "
            "give checkpoint.GroupCoordinator(process_group)"
        )
    return coordinator


class Arrival(dict[str, str]):
    """What this rank brings to the first meeting of an operation: what comes first, for ever. (A
    dict, so that making one is a single step for signal handlers.)
    """

    def is_for(self, what: str) -> bool:
        return self.setdefault("what", what) == what


def is_amid(ranks: Coordinator) -> bool:
    """Whether this thread would wait for itself: it is in the midst of another operation of these
    ranks, or calls what the program gave to one. Those hear of what is wrong if that ends by it.
    """
    return ranks.world_size > 1 and is_within(ranks)


def amid(ranks: Coordinator, operation: Operation) -> RuntimeError:
    """The error of an operation where `is_amid`."""
    return RuntimeError(
        f"rank {ranks.rank} {doing(operation)} in the midst of another call with the same "
        "coordinator, which goes on only when that ends: in a handler of a signal or of the log, a "
        "finalizer, or a byte source or sink; set a flag there, and make the call later"
    )


def accompanied(ranks: Coordinator, operation: Operation, way: Callable[[Arrival], T]) -> T:
    """Goes the way to the first meeting of an operation, and on. Where it ends before, because it
    fails or is interrupted at whatever line, that is what this rank brings to the meeting: the
    operation fails on every rank.

    Whoever meets for the operation says so before: the arrival is for "meeting" then. Raises
    RuntimeError where it `is_amid`, of which nobody is told.
    """
    arrival = Arrival()
    try:
        if is_amid(ranks):
            arrival.is_for("nothing")
            raise amid(ranks, operation)
        return way(arrival)
    except BaseException as error:
        # Alone it is raised here: a frame that is given it would keep what it has come through.
        if arrival.is_for("error") and ranks.world_size > 1:
            tell(ranks, operation, error)
        raise


def tell(ranks: Coordinator, operation: Operation, error: BaseException) -> None:
    """Brings an error to the first meeting of an operation of several ranks, and raises it. The
    others may be long in coming: the second interrupt ends the waiting for them, and they are told
    all the same.
    """

    def meet(_: object) -> None:
        within = enter(ranks)
        ranks.begin(operation)
        try:
            ranks.exchange(error)
        finally:
            ranks.end()
            within.ends()

    worker = Worker(meet, "checkpoint-tell")
    try:
        worker.start()
        worker.ended.wait()
    except OSError:  # there is no thread to be had
        meet(worker)
    except BaseException:
        worker.start()  # it may not have begun
        worker.ended.wait()
        raise
    worker.outcome()


def together(ranks: Coordinator, step: Callable[[], T]) -> list[T]:
    """Takes a step that all ranks take; gives what it gave on each of them, JSON values.

    Raises what the step raised here, or RankFailedError if it failed elsewhere. What the step heard
    of a failure by way of other ranks, or another coordinator, is told as any other error is.
    """
    try:
        value = step()
    except BaseException as error:
        ranks.exchange(error)
        raise
    return ranks.exchange(value)


def apart(ranks: Coordinator, step: Callable[[], T]) -> T:
    """Takes a step that all ranks take, each for itself. Raises as `together`."""
    given: list[T] = []
    together(ranks, lambda: given.append(step()))
    return given[0]
