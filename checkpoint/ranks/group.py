"""Agreement between the ranks of a ``torch.distributed`` group, over a gloo group of its own.

Ranks meet at *points*, each with a kind and a number. At every point all ranks first tell each
other which point they are at, in messages of one size; only when all are at the same one does
anything else follow. So ranks that have gone different ways find out, and are told where the others
are, before messages of different sizes could meet.

A rank that fails outside of a point says why in the store of the group, then leaves it, which ends
the waiting of all others at once. A rank that was killed says nothing; its peers see its
connections closed. One that hangs is waited for until the timeout.

Messages are JSON. Nothing here touches the group that trains, so it may run on any thread, one at a
time.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from aio.errors import check_seconds
from checkpoint.errors import RankFailedError
from checkpoint.ranks.coordinator import Operation, doing
from checkpoint.sheltered import describe

T = TypeVar("T")
_CAUSE = "infinity-cause"
_MADE = "infinity-made"
_GIVEN_UP = "infinity-given-up"
_HEADER = 4
_OWN = ("checkpoint.ranks.group", "infinity.ranks.collectives")
"""Modules of which the code calls what raises the errors of a transfer."""
_HANDLERS = "signal_handling"
"""Module of torch's own handler, which tells of data loaders that died."""
_DEFAULT_SECONDS = 1800.0
_Gloo: Any = getattr(dist, "ProcessGroupGloo", None)
_PrefixStore: Any = getattr(dist, "PrefixStore", None)
Name = Callable[[int, int], str]
"""What a rank is doing at a point of that kind and number, for messages. The kinds of ``exchange``
and ``broadcast`` are those of ``Operation``; others are their callers'."""


class GroupCoordinator:
    """A ``Coordinator`` of the ranks of ``process_group`` (default: all). Making one is itself
    collective, as is every method but ``leave``.

    ``timeout_seconds`` is how long a rank waits for another (default: what the group was made
    with). Every method raises ``RankFailedError`` when another rank failed, is gone, or is
    elsewhere; from then on the coordinator is of no use.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        timeout_seconds: float | None = None,
        name: Name | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "there is no process group; call torch.distributed.init_process_group() first"
            )
        parent = dist.group.WORLD if process_group is None else process_group
        if not isinstance(parent, dist.ProcessGroup):
            raise TypeError(
                f"process_group is a {type(parent).__name__}, not a group of torch.distributed"
            )
        ranks = dist.get_process_group_ranks(parent)
        self.rank = dist.get_rank(parent)
        self.world_size = len(ranks)
        if self.rank < 0:
            raise ValueError("this process is not a rank of process_group")
        with turn_of(parent):
            number = _counts.get(parent, 0) + 1
            self._store: Any = _store_beside(parent, number)
            timeout = self._agreed(parent, number, timeout_seconds, name)
            self._seconds = timeout.total_seconds()
            # Not one of torch's own groups: those have names, in the way of the next one.
            self._group: Any = self._connected(timeout)
        self._name = name or _plain_name
        self._failure: RankFailedError | None = None
        self._count = 0
        self.exchanges: Counter[int] = Counter()
        """How many there were for each operation; saves may go on behind others."""
        self.failures: Counter[int] = Counter()
        """Of which ranks told each other, likewise."""
        self._operation = Operation.COMPARE
        self._turn = threading.Lock()

    def _agreed(
        self, parent: Any, number: int, seconds: float | None, name: Name | None
    ) -> timedelta:
        """How long ranks wait. What is wrong with the arguments of one of them is told to all: they
        would wait in vain for it to connect.

        Who gives up waiting has not been here: it comes to this number again, where those are that
        were missing.
        """
        timeout = _timeout_of(parent)
        refusals: list[Exception] = []
        try:
            _check_arguments(seconds, name)
            timeout = timeout if seconds is None else timedelta(0, seconds)
        except (TypeError, ValueError, OverflowError) as error:
            refusals.append(error)
        keys = [f"{_MADE}-{rank}" for rank in range(self.world_size)]
        try:
            self._store.delete_key(f"{_GIVEN_UP}-{self.rank}")
            self._store.set(keys[self.rank], describe(refusals[0]) if refusals else "")
            _counts[parent] = number
            if refusals:
                raise refusals.pop()
            self._store.wait(keys, timeout)
            answers = [self._store.get(key).decode(errors="replace") for key in keys]
        except RuntimeError as error:
            missing = self._missing()
            _counts[parent] = number - 1
            self._withdraw()
            raise RankFailedError(
                f"ranks {missing} have not made their GroupCoordinator within "
                f"{timeout.total_seconds():g} s, or were killed: {error}"
            ) from error
        for rank, answer in enumerate(answers):
            if answer:
                raise RankFailedError(f"rank {rank} failed: {answer}", rank=rank)
        return timeout

    def _connected(self, timeout: timedelta) -> Any:
        try:
            return _Gloo(self._store, self.rank, self.world_size, timeout)
        except RuntimeError as error:
            raise RankFailedError(
                "a rank was killed or interrupted as it made its GroupCoordinator, or does not "
                f"answer (ranks wait {timeout.total_seconds():g} s for others): {error}"
            ) from error

    def _is_told(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:  # the store has gone with rank 0
            return False

    def _missing(self) -> list[int]:
        """Who has not come; a rank that has given up meanwhile was waiting for others, too."""
        away = [rank for rank in range(self.world_size) if not self._is_told(f"{_MADE}-{rank}")]
        return [rank for rank in away if not self._is_told(f"{_GIVEN_UP}-{rank}")] or away

    def _withdraw(self) -> None:
        with suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(f"{_GIVEN_UP}-{self.rank}", "")
            self._store.delete_key(f"{_MADE}-{self.rank}")

    # Taking turns.

    def begin(self, operation: Operation = Operation.COMPARE) -> None:
        """Waits until nothing else of this process uses the coordinator; ``end`` must follow. Until
        then exchanges are for this operation.
        """
        self._turn.acquire()
        self._operation = operation

    def end(self) -> None:
        """Lets the next one use it."""
        self._operation = Operation.COMPARE
        self._turn.release()

    # Meeting.

    def meet(self, kind: int, number: int, nbytes: int = 0, digest: int = 0) -> list[list[int]]:
        """Waits until every rank is at this point; gives (kind, number, nbytes, digest) by rank.

        Raises RankFailedError naming a rank that is at another point.
        """
        header = torch.tensor([kind, number, nbytes, digest], dtype=torch.int64, device="cpu")
        rows = [
            torch.empty(_HEADER, dtype=torch.int64, device="cpu") for _ in range(self.world_size)
        ]
        self._collective(lambda: self._group.allgather([rows], [header]).wait())
        points = [[int(value) for value in row] for row in rows]
        for rank, point in enumerate(points):
            if point[:2] != [kind, number]:
                raise self._fail(
                    RankFailedError(
                        f"rank {self.rank} {self._name(kind, number)}, rank {rank} "
                        f"{self._name(point[0], point[1])}: every rank has to do the same things "
                        "in the same order",
                        rank=rank,
                    )
                )
        return points

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank; a JSON value."""
        given: T = self.exchange(value if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return given

    def exchange(self, value: T | BaseException) -> list[T]:
        """The values of all ranks, by rank, on every rank; JSON values.

        If any rank's is an exception, every rank raises: that one its own, the others
        RankFailedError with what failed first. What is no JSON value fails so, too.
        """
        try:
            raw = json.dumps(_encoded(value)).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            return self.exchange(error)
        self._count += 1
        self.exchanges[self._operation] += 1
        sizes = [point[2] for point in self.meet(self._operation, self._count, len(raw))]
        own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in sizes]
        self._collective(lambda: self._group.allgather([every], [own]).wait())
        answers = [
            json.loads(tensor[:size].numpy().tobytes())
            for tensor, size in zip(every, sizes, strict=True)
        ]
        failed = [(*answer["at"], rank) for rank, answer in enumerate(answers) if "error" in answer]
        self.failures[self._operation] += isinstance(value, BaseException) or bool(failed)
        if isinstance(value, BaseException):
            raise value
        if failed:
            *_, rank = min(failed)
            raise RankFailedError(f"rank {rank} failed: {answers[rank]['error']}", rank=rank)
        return [answer["value"] for answer in answers]

    def gather(self, values: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The flat CPU tensors of all ranks, which have these ``lengths``; at a point where they
        have met.
        """
        own = torch.zeros(max(lengths), dtype=values.dtype, device="cpu")
        own[: values.numel()] = values
        every = [torch.empty_like(own) for _ in lengths]
        self._collective(lambda: self._group.allgather([every], [own]).wait())
        return [tensor[:length] for tensor, length in zip(every, lengths, strict=True)]

    @property
    def transfers(self) -> Any:
        """The group of this coordinator, for what its ranks start one after the other, each in the
        same order. Raises ``RankFailedError`` when this rank has left it.
        """
        if self._group is None:
            raise RankFailedError("this rank has left its group")
        return self._group

    # Leaving.

    @property
    def is_open(self) -> bool:
        """Whether the ranks can still meet."""
        return self._group is not None and self._failure is None

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the group; with ``error``, the others are told why. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        if error is not None and not isinstance(error, RankFailedError):
            self._tell(f"rank {self.rank} failed: {describe(error)}")
        self._store = None

    def failure_of(self, error: BaseException) -> RankFailedError:
        """What an error of a collective means: who failed first, if that is known. The coordinator
        is of no use from then on.
        """
        cause = self._told_cause()
        waited = f" (ranks wait {self._seconds:g} s for others)"
        if cause is None:
            cause = f"a rank was killed, or does not answer{waited}: {error}"
            self._tell(f"rank {self.rank} lost another one: {cause}")
        return self._fail(RankFailedError(cause))

    def _collective(self, run: Callable[[], Any]) -> None:
        if self._failure is not None:
            raise RankFailedError(str(self._failure), rank=self._failure.rank)
        if self._group is None:
            raise RankFailedError("this rank has left its group")
        try:
            run()
        except RuntimeError as error:
            if not is_of_transfer(error):
                raise
            raise self.failure_of(error) from error

    def _fail(self, failure: RankFailedError) -> RankFailedError:
        # Not itself: with its frames it would keep what was computed, a graph of autograd too.
        self._failure = RankFailedError(str(failure), rank=failure.rank)
        return failure

    def _tell(self, cause: str) -> None:
        """The first cause stays."""
        if self._store is not None:
            try:
                self._store.compare_set(_CAUSE, "", cause)
            except RuntimeError:  # the store has gone with rank 0; the connection says enough
                return

    def _told_cause(self) -> str | None:
        if self._store is None:
            return None
        try:
            if not self._store.check([_CAUSE]):
                return None
            told: bytes = self._store.get(_CAUSE)
        except RuntimeError:
            return None
        return told.decode(errors="replace")


def is_of_transfer(error: RuntimeError) -> bool:
    """Whether torch raised it, or we. Any other is raised by the handler of a signal, which came
    while the main thread waited for the other ranks.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    is_of_torch = module.partition(".")[0] == "torch" and not module.endswith(_HANDLERS)
    return is_of_torch or module in _OWN


def _check_arguments(seconds: float | None, name: Name | None) -> None:
    check_seconds("timeout_seconds", seconds)
    if seconds is not None and not seconds > 0:
        raise ValueError(f"timeout_seconds={seconds} is no time to wait")
    if name is not None and not callable(name):
        raise TypeError(f"name is a {type(name).__name__}, not a function of a kind and a number")


def _encoded(value: object) -> dict[str, Any]:
    if not isinstance(value, BaseException):
        return {"value": value}
    # What another rank failed of comes after what failed by itself.
    return {"error": describe(value), "at": [isinstance(value, RankFailedError), time.time()]}


def _plain_name(kind: int, number: int) -> str:
    what = doing(kind)
    return f"is at point {kind}:{number}" if what is None else f"{what} (exchange {number})"


_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many coordinators were made beside a process group; the same on every rank of it."""
_turns: WeakKeyDictionary[Any, AbstractContextManager[Any]] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def turn_of(process_group: Any) -> AbstractContextManager[Any]:
    """What one thread at a time is in, as often as it likes, to make coordinators of a group: all
    that belong together, so that those of another thread do not come between them on one rank.
    """
    with _turns_lock:
        return _turns.setdefault(process_group, threading.RLock())


def _store_beside(group: Any, count: int) -> Any:
    """A store of the ranks of ``group`` for one coordinator alone, the one of that number."""
    found = getattr(group, "get_group_store", None)
    store = dist.distributed_c10d._get_default_store() if found is None else found()
    return _PrefixStore(f"infinity-{group.group_name}-{count}", store)


def _timeout_of(group: Any) -> timedelta:
    """What a group was made with."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return timedelta(seconds=_DEFAULT_SECONDS)
