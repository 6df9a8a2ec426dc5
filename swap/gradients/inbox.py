"""Gradients on their way from a compute device: copied to host memory behind the backward pass, and
stored by a thread.

A gradient goes in pieces, so the memory that they take in between is bounded whatever its size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aio import Slab, SlabFullError
from aio.errors import let_go
from aio.threads import LOOK_SECONDS, Changes, Latch, Thread, join_thread, start_thread
from swap.cache.patience import Patience
from swap.device.interface import ComputeDevice, Event, Stream
from swap.memory.uses import other_uses
from swap.plain import plain
from swap.plan.layout import PIECE
from swap.processors import stay_in_background
from swap.storage.components import as_tensor

_RELEASE_SECONDS = 2.0
"""How long a gradient waits for memory of one that is stored."""
_PIECES_IN_FLIGHT = 8
"""A piece takes such a part of the memory: while some are copied, others are stored."""
_BATCH_BYTES = 1024 * 1024
"""So many bytes of pieces are waited for at once."""


class Store(Protocol):
    """Who takes what has arrived."""

    def __call__(
        self, parameter: int, start: int, values: torch.Tensor, *, is_last: bool
    ) -> object:
        """Elements from ``start`` of the gradient of ``parameter``, whole blocks of ``PIECE`` but
        for the last ones; in order.
        """


class Lose(Protocol):
    """Who is told of a gradient that could not be copied or stored."""

    def __call__(self, parameter: int, failure: BaseException, /) -> object: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Elements on their way to ``buffer``, which are there when ``event`` is done. ``source`` is
    the whole gradient: it is kept until then.
    """

    parameter: int
    start: int
    buffer: torch.Tensor
    event: Event
    source: torch.Tensor
    is_last: bool


class GradientInbox:
    """``slab`` bounds the copies in flight; ``add`` waits for room in it.

    ``_pending`` is the only record of what is under way, its head being what the thread works on:
    an interrupt has no moment in which a gradient is counted and not there.
    """

    def __init__(self, device: ComputeDevice, slab: Slab, store: Store, lose: Lose) -> None:
        self._device = device
        self._slab = slab
        self._store = store
        self._lose = lose
        self._pending: deque[_Piece] = deque()
        self._failed: torch.Tensor | None = None
        """The gradient whose first pieces could not be stored; the rest is not wanted."""
        self._closing = False
        self._lock = threading.Lock()
        self._changes = Changes()
        self._thread = Thread(self._run, "infinity-gradients")
        try:
            start_thread(self._thread)
        except BaseException:
            self._closing = True
            raise

    def add(self, parameter: int, gradient: torch.Tensor) -> None:
        """Start moving ``gradient`` to the store; it may be let go of, and changed, on return.

        Raises ``SlabFullError`` where there is no room for a piece of it, and what the device
        raises; then it is lost.
        """
        try:
            flat = plain(gradient.detach()).reshape(-1)
            self._device.wait_for(Stream.DOWN, self._device.record(Stream.COMPUTE))
            for start, part in self._pieces(flat):
                self._start(parameter, start, part, flat)
            if other_uses(flat) > 1:  # the program's, which may change it
                self._device.wait_for(Stream.COMPUTE, self._device.record(Stream.DOWN))
        except BaseException as failure:
            self._lose(parameter, let_go(failure))
            raise

    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """At least one, and none for which there could be no room."""
        elements = self._slab.nbytes // _PIECES_IN_FLIGHT // flat.itemsize // PIECE * PIECE
        elements = max(PIECE, elements)
        for start in range(0, max(1, flat.numel()), elements):
            yield start, flat[start : start + elements]

    def _start(self, parameter: int, start: int, part: torch.Tensor, whole: torch.Tensor) -> None:
        buffer = as_tensor(self._allocate(part.nbytes), part.dtype)
        self._device.copy(Stream.DOWN, buffer, part)
        event = self._device.record(Stream.DOWN)
        is_last = start + part.numel() == whole.numel()
        self._pending.append(_Piece(parameter, start, buffer, event, whole, is_last))
        with self._lock:
            self._changes.tell()

    def wait(self) -> None:
        """Wait until every gradient is stored or lost."""
        while (change := self._change_unless_empty()) is not None:
            change.wait(LOOK_SECONDS)

    def _change_unless_empty(self) -> Latch | None:
        with self._lock:
            if not self._pending:
                return None
            self._changes.tell()  # an interrupted ``add`` may not have
            return self._changes.next()

    def close(self) -> None:
        """Finish what is under way, then end the thread. Idempotent."""
        self._closing = True
        with self._lock:
            self._changes.tell()
        join_thread(self._thread)

    def _allocate(self, nbytes: int) -> Any:
        patience = Patience(_RELEASE_SECONDS)
        while True:
            with self._lock:
                self._changes.tell()  # as in ``wait``
                may_come_back = bool(self._pending)
            try:
                return self._slab.allocate(nbytes)
            except SlabFullError:
                if nbytes > self._slab.nbytes:
                    raise
                # What was stored last may still be on its way out of the thread that did it.
                waits = patience.waits(self._slab.wait_for_release, is_at_work=may_come_back)
                if not waits and not may_come_back:
                    raise

    def _run(self) -> None:
        stay_in_background()
        while self._wait_for_one():
            count, failure = self._wait_for_batch()
            for _ in range(count):
                self._finish_one(failure)
                with self._lock:
                    self._pending.popleft()
                    self._changes.tell()

    def _wait_for_one(self) -> bool:
        """False when there is nothing left to do, and never will be."""
        while True:
            with self._lock:
                if self._pending or self._closing:
                    return bool(self._pending)
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def _wait_for_batch(self) -> tuple[int, BaseException | None]:
        """How many pieces have arrived: those of small gradients are waited for at once. And what
        the device raised in place of that.
        """
        count = nbytes = 0
        for piece in tuple(self._pending):
            nbytes += piece.buffer.nbytes
            if count and nbytes > _BATCH_BYTES:
                break
            count, event = count + 1, piece.event
        try:
            event.wait()
        except BaseException as failure:
            return count, let_go(failure)
        return count, None

    def _finish_one(self, failure: BaseException | None) -> None:
        piece = self._pending[0]
        try:
            if failure is not None:
                raise failure
            if self._failed is not piece.source:
                self._store(piece.parameter, piece.start, piece.buffer, is_last=piece.is_last)
        except BaseException as error:
            # Frames would keep the buffer, and ``add`` would wait for that for ever.
            self._lose(piece.parameter, let_go(error))
            self._failed = piece.source
        if piece.is_last:
            self._failed = None
