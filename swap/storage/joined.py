"""Several operations, waited for as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from aio import AioError, Operation, Request
from aio.errors import let_go


class JoinedOperation(Operation):
    """Operations whose buffers are parts of one, as one operation: ended when all have."""

    __slots__ = ("_pieces",)

    def __init__(self, request: Request, pieces: Sequence[Operation]) -> None:
        """``request`` is for the whole buffer, at the place of its first piece."""
        self.request = request
        self._pieces = tuple(pieces)

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def result(self, timeout: float | None = None) -> int:
        """As of one operation. After an error, too, all have ended and the buffer is free."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failures: list[AioError] = []
        moved = 0
        for piece in self._pieces:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                moved += piece.result(left)
            except AioError as error:
                failures.append(let_go(error))
        if failures:
            raise failures.pop(0)
        return moved

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        others = [None] * (len(self._pieces) - 1)

        def one_ended(_: Operation) -> None:
            try:
                others.pop()  # by one thread only, whoever comes first
            except IndexError:
                callback(self)

        for piece in self._pieces:
            piece.add_done_callback(one_ended)

    @property
    def started_at(self) -> float:
        return min(piece.started_at for piece in self._pieces)

    @property
    def finished_at(self) -> float:
        return max(piece.finished_at for piece in self._pieces)

    def __repr__(self) -> str:
        return f"<JoinedOperation {', '.join(map(repr, self._pieces))}>"


@contextmanager
def _ended_together() -> Iterator[list[Operation]]:
    """Transfers that have all ended when the block is left; raises the first failure among them."""
    pending: list[Operation] = []
    failures: list[AioError] = []
    try:
        yield pending
    finally:
        for operation in pending:
            try:
                operation.result()
            except AioError as error:
                failures.append(let_go(error))
    if failures:
        raise failures.pop(0)


def run_together(begin: Callable[[list[Operation]], None]) -> None:
    """Begin transfers, and wait for all of them. No function in a function: an error that is kept
    would keep what that is to transfer.
    """
    with _ended_together() as pending:
        begin(pending)
