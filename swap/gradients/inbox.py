"""Gradients on their way from a compute device: copied to host memory behind the backward pass, and
stored by a thread.

A gradient goes in pieces, so the host memory that they take is bounded whatever its size is.
Until there is room for its pieces it stays where it was computed, and the backward pass goes on: a
device that waited for its link after each layer would stand still for a part of each. So much more
device memory than that of one gradient is taken (``MOST_COMING_BYTES``), where plain training keeps
all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aio import Slab, SlabFullError
from aio.errors import let_go
from aio.process.threads import LOOK_SECONDS, Changes, Thread, join_thread, start_thread
from swap.cache.patience import Patience
from swap.device.interface import ComputeDevice, Event, Stream
from swap.interruptions.undo import Undo
from swap.memory.uses import other_uses
from swap.plain import plain
from swap.plan.layout import PIECE
from swap.processors import stay_in_background
from swap.storage.components import as_tensor

MOST_COMING_BYTES = 512 * 1024 * 1024
"""Of gradients that wait on the device: those of a layer of some 200 M parameters."""
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


@dataclass(slots=True, eq=False)
class _Coming:
    """A gradient on the device, flat, which is there when ``computed`` is done. Copies of its
    elements before ``started`` have begun. ``failure``: what it was lost by; the rest is not wanted
    then, and ``is_told`` whether that was told.
    """

    parameter: int
    values: torch.Tensor
    computed: Event
    started: int = 0
    is_started: bool = False
    failure: BaseException | None = None
    is_told: bool = False

    @property
    def bytes_left(self) -> int:
        return (self.values.numel() - self.started) * self.values.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Elements on their way to ``buffer``, which are there when ``event`` is done. The gradient is
    kept until then.
    """

    gradient: _Coming
    start: int
    buffer: torch.Tensor
    event: Event
    is_last: bool


class GradientInbox:
    """``slab`` bounds the copies in flight. ``add`` waits where more than ``most_coming_bytes`` of
    other gradients still lie on the device. ``undo`` closes it, also if making it is interrupted.

    ``_coming`` and ``_pending`` are the only records of what is under way, their heads being what
    the thread works on: an interrupt has no moment in which a gradient is counted and not there.

    A piece whose copy nobody could wait for gives its room back, though it may still be written to:
    nothing but copies of one stream ever writes to ``slab``, so what is read of the next piece
    there came behind, and values that are lost may come from memory that is used anew.
    """

    def __init__(
        self,
        device: ComputeDevice,
        slab: Slab,
        store: Store,
        lose: Lose,
        undo: Undo,
        *,
        most_coming_bytes: int = MOST_COMING_BYTES,
    ) -> None:
        self._device = device
        self._slab = slab
        self._store = store
        self._lose = lose
        self._most_coming_bytes = most_coming_bytes
        self._coming: deque[_Coming] = deque()
        self._pending: deque[_Piece] = deque()
        self._closing = False
        self._lock = threading.Lock()
        self._changes = Changes()
        self._thread = Thread(self._run, "infinity-gradients", tells=True)
        undo.callback(self.close)
        start_thread(self._thread)

    def add(self, parameter: int, gradient: torch.Tensor) -> None:
        """Start moving ``gradient`` to the store; it may be let go of, and changed, on return.

        Raises what the device raises; then it is lost.
        """
        try:
            flat = plain(gradient.detach()).reshape(-1)
            self._wait_until(self._has_room_on_device)
            if other_uses(flat) > 1:  # the program's, which may change it
                flat = flat.clone()
            self._coming.append(_Coming(parameter, flat, self._device.record(Stream.COMPUTE)))
            with self._lock:
                self._changes.tell()
        except BaseException as failure:
            self._lose(parameter, let_go(failure))
            raise

    def wait(self) -> None:
        """Wait until every gradient is stored or lost."""
        self._wait_until(self._is_empty)

    def close(self) -> None:
        """Finish what is under way, then end the thread. Idempotent."""
        self._closing = True
        with self._lock:
            self._changes.tell()
        join_thread(self._thread)

    def _is_empty(self) -> bool:
        return not (self._coming or self._pending)

    def _has_room_on_device(self) -> bool:
        coming = list(self._coming)
        return not coming or sum(one.bytes_left for one in coming) <= self._most_coming_bytes

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        is_told = False
        while True:
            with self._lock:
                if is_so():
                    return
                if not is_told:  # an interrupted ``add`` may not have; once: others wait, too
                    self._changes.tell()
                change = self._changes.next()
            is_told = True
            change.wait(LOOK_SECONDS)

    # The thread.

    def _run(self) -> None:
        stay_in_background()
        self._thread.take_turns(self._turn)

    def _turn(self) -> bool:
        """False when there is nothing left to do. Repeated where there was no memory: what is lost
        by that is noted before anything else is tried.
        """
        if not self._wait_for_one():
            return False
        self._start_pieces()
        if self._pending:
            self._finish_batch()
        return True

    def _wait_for_one(self) -> bool:
        """False when there is nothing left to do, and never will be."""
        while True:
            with self._lock:
                if not self._is_empty() or self._closing:
                    return not self._is_empty()
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def _start_pieces(self) -> None:
        """As many as there is room for."""
        while self._coming:
            gradient = self._coming[0]
            try:
                while not (gradient.is_started or gradient.failure):
                    if not self._start_piece(gradient):
                        return
            except BaseException as failure:
                gradient.failure = gradient.failure or failure
            self._tell_if_lost(gradient)
            with self._lock:
                gradient.is_started = True
                self._coming.popleft()
                self._changes.tell()

    def _start_piece(self, gradient: _Coming) -> bool:
        """False where there is no room before another piece is stored. Raises ``SlabFullError``
        where there is none at all.
        """
        values, start = gradient.values, gradient.started
        part = values[start : start + self._elements_of_piece(values)]
        memory = self._slab_range(part.nbytes)
        if memory is None:
            return False
        buffer = as_tensor(memory, part.dtype)
        if not start:
            self._device.wait_for(Stream.DOWN, gradient.computed)
        self._device.copy(Stream.DOWN, buffer, part)
        event = self._device.record(Stream.DOWN)
        gradient.started = stop = start + part.numel()
        is_last = stop == values.numel()
        self._pending.append(_Piece(gradient, start, buffer, event, is_last))
        gradient.is_started = is_last
        return True

    def _elements_of_piece(self, values: torch.Tensor) -> int:
        """None for which there could be no room."""
        elements = self._slab.nbytes // _PIECES_IN_FLIGHT // values.itemsize // PIECE * PIECE
        return max(PIECE, elements)

    def _slab_range(self, nbytes: int) -> np.ndarray | None:
        patience = Patience(_RELEASE_SECONDS)
        while True:
            try:
                return self._slab.allocate(nbytes)
            except SlabFullError:
                if self._pending:
                    return None
                # What was stored last may still be on its way out.
                if nbytes > self._slab.nbytes or not patience.waits(self._slab.wait_for_release):
                    raise

    def _finish_batch(self) -> None:
        count, failure = self._wait_for_batch()
        for _ in range(count):
            self._finish_one(failure)
            with self._lock:
                self._pending.popleft()
                self._changes.tell()

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
        gradient = piece.gradient
        try:
            if failure is not None:
                raise failure
            if gradient.failure is None:
                self._store(gradient.parameter, piece.start, piece.buffer, is_last=piece.is_last)
        except BaseException as error:
            gradient.failure = gradient.failure or error
        self._tell_if_lost(gradient)

    def _tell_if_lost(self, gradient: _Coming) -> None:
        # Frames would keep the buffer, and there would never be room for another one.
        if gradient.failure is not None and not gradient.is_told:
            self._lose(gradient.parameter, let_go(gradient.failure))
            gradient.is_told = True
