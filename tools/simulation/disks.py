"""An engine whose transfers take the time of disks and move nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from aio import Engine, File, Request
from simulation.hardware import Hardware, Resource


class Transfer:
    """What ``SimulatedEngine.submit`` returns; see ``aio.Operation``."""

    def __init__(self, hardware: Hardware, request: Request) -> None:
        self.request = request
        self.started_at = self.finished_at = hardware.now
        self._hardware = hardware
        self._is_done = False
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def nbytes(self) -> int:
        given: Any = self.request.buffer
        return memoryview(given).nbytes

    def done(self) -> bool:
        return self._is_done

    def result(self, timeout: float | None = None) -> int:
        self._hardware.wait(lambda: self._is_done)
        return self.nbytes

    def abandon(self) -> None:
        self.result()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def finish(self) -> None:
        self._is_done = True
        self.finished_at = self._hardware.now
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()


class SimulatedEngine:
    """Takes the place of ``aio.Engine`` under ``swap``. Reads share one rate, writes another.

    ``real`` opens files. Bytes count ``scale`` times.
    """

    def __init__(
        self, hardware: Hardware, real: Engine, reads: Resource, writes: Resource, scale: int
    ) -> None:
        self._hardware, self._real, self._scale = hardware, real, scale
        self._resources = {"read": reads, "write": writes}
        self._under_way: set[Transfer] = set()

    def open(self, path: str | os.PathLike[str], mode: Any) -> File:
        return self._real.open(path, mode)

    def submit(self, requests: Sequence[Request], *, lane: int = 0) -> list[Transfer]:
        transfers = [Transfer(self._hardware, request) for request in requests]
        for transfer in transfers:
            self._under_way.add(transfer)
            transfer.add_done_callback(self._under_way.discard)
            resource = self._resources[transfer.request.kind]
            amount = transfer.nbytes * self._scale
            self._hardware.begin(resource, lane, amount, transfer.finish)
        return transfers

    def drain(self) -> None:
        self._hardware.wait(lambda: not self._under_way)

    def close(self) -> None:
        self.drain()

    def __enter__(self) -> SimulatedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
