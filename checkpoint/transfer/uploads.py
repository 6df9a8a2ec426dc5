"""Bytes of staging buffers on their way to tensors on devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeGuard

from checkpoint.tensors.copiers import Buffer, Copier, Transfers
from checkpoint.tensors.targets import BoxWriter

_MAX_IN_FLIGHT = 4


class Piece(NamedTuple):
    """Bytes of a buffer, and the box that they belong to, from a byte of it on."""

    writer: BoxWriter
    first_byte: int
    data: memoryview


class Uploads:
    """Of one file, whose buffers devices are told of before the first of them is copied."""

    def __init__(self, copier: Copier, buffers: Sequence[Buffer]) -> None:
        self._copier = copier
        self._unregistered = buffers
        self._in_flight: deque[tuple[Transfers, Buffer]] = deque()

    def takes(self, deliver: object) -> TypeGuard[BoxWriter]:
        """Whether a place's function writes to a device."""
        return isinstance(deliver, BoxWriter) and self._copier.takes(deliver.part)

    def begin(self, pieces: Sequence[Piece], buffer: Buffer) -> list[Buffer]:
        """Begins to copy pieces of a buffer, which comes back by this or a later call, or by `end`.
        Raises what the device does; nothing of the buffer is under way then, and it is not kept.
        """
        if self._unregistered:
            self._copier.register(self._unregistered)
            self._unregistered = ()
        transfers = self._copier.transfers()
        try:
            for writer, first_byte, data in pieces:
                writer.copy(first_byte, data, transfers.copy)
        except BaseException:
            transfers.wait()
            raise
        self._in_flight.append((transfers, buffer))
        return [self.end()] if len(self._in_flight) > _MAX_IN_FLIGHT else []

    def end(self) -> Buffer:
        """The oldest buffer, once its bytes are there."""
        transfers, buffer = self._in_flight.popleft()
        transfers.wait()
        return buffer

    def end_all(self) -> None:
        while self._in_flight:
            self.end()

    def abandon(self) -> None:
        """Waits for all, and forgets how they end: an error is on its way."""
        while self._in_flight:
            with suppress(RuntimeError):
                self.end()
