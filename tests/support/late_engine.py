"""An engine as unkind as the contract of aio allows: late, out of order, and failing on demand.

A request is carried out when somebody waits for it, or at random before; data is taken from and
put into buffers and files at that moment and no other. So memory or space on the SSD that is given
back while a transfer is still in flight shows as wrong bytes, every time and not once a month.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aio import AioError, Engine, File, Request

Kind = Literal["read", "write", "allocate", "any"]
GARBAGE = 0xA5


@dataclass(slots=True)
class Faults:
    """Which requests fail: of one kind, after so many good ones, so many times. Thread-safe."""

    kind: Kind | None = None
    after: int = 0
    times: int = 0
    errno: int = 0
    raised: int = 0
    matches: Callable[[Request], bool] = lambda _: True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(
        self,
        kind: Kind,
        errno: int,
        *,
        after: int = 0,
        times: int = 1,
        matches: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        with self._lock:
            self.kind, self.errno, self.after, self.times = kind, errno, after, times
            self.matches = matches

    def disarm(self) -> None:
        with self._lock:
            self.times = 0

    def next_errno(self, kind: Kind, request: Request | None = None) -> int:
        """The errno that this request shall fail with; 0 for none."""
        with self._lock:
            if self.kind not in (kind, "any") or not self.times:
                return 0
            if request is not None and not self.matches(request):
                return 0
            if self.after:
                self.after -= 1
                return 0
            self.times -= 1
            self.raised += 1
            return self.errno


class LateOperation:
    """What ``LateEngine.submit`` returns; see ``aio.Operation``."""

    def __init__(self, engine: "LateEngine", request: Request, lane: int, errno: int) -> None:
        self.request = request
        self.lane = lane
        self.started_at = self.finished_at = 0.0
        self._engine = engine
        self._errno = errno
        self._finished = False
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        self._engine.carry_out_some()
        return self._finished

    def result(self, timeout: float | None = None) -> int:
        self.carry_out()
        if self._errno:
            raise _error(self.request, self._errno)
        return _bytes(self.request).nbytes

    def abandon(self) -> None:
        self.carry_out()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                return
        callback(self)

    def carry_out(self) -> None:
        with self._lock:
            if self._finished:
                return
            self.started_at = time.perf_counter()
            self._engine.transfer(self.request, failing=bool(self._errno))
            self.finished_at = time.perf_counter()
            self._finished = True
            self._engine.forget(self)
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()


class LateEngine:
    """Takes the place of ``aio.Engine`` under ``swap``."""

    def __init__(
        self, lanes: int, *, seed: int = 0, faults: Faults | None = None, eager: float = 0.3
    ) -> None:
        """``eager``: how likely a call of any kind is to carry out one request, any one."""
        self.lanes = lanes
        self.eager = eager
        self.faults = faults or Faults()
        self.log: list[tuple[str, int, int]] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._late: list[LateOperation] = []
        self._engine = Engine("posix", queue_depth=4)

    def open(self, path: str | os.PathLike[str], mode: Any) -> File:
        file = self._engine.open(path, mode)
        allocate, close = file.allocate, file.close

        def allocate_or_fail(offset: int, nbytes: int) -> None:
            nothing = Request("write", file, offset, b"")
            errno = self.faults.next_errno("allocate", nothing)
            if errno:
                raise _error(nothing, errno, action="allocate", nbytes=nbytes)
            allocate(offset, nbytes)

        def close_when_idle() -> None:
            self.carry_out_all()
            close()

        vars(file).update(allocate=allocate_or_fail, close=close_when_idle)
        return file

    def submit(self, requests: Sequence[Request], *, lane: int) -> list[LateOperation]:
        assert 0 <= lane < self.lanes
        made = []
        for request in requests:
            self.log.append((request.kind, lane, _bytes(request).nbytes))
            errno = self.faults.next_errno(request.kind, request)
            made.append(LateOperation(self, request, lane, errno))
        with self._lock:
            self._late += made
        self.carry_out_some()
        return made

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            return len(self._late)

    def carry_out_some(self) -> None:
        """Now and then one request of those in flight, whichever."""
        with self._lock:
            if not self._late or self._random.random() >= self.eager:
                return
            chosen = self._random.choice(self._late)
        chosen.carry_out()

    def drain(self) -> None:
        self.carry_out_all()

    def carry_out_all(self) -> None:
        while True:
            with self._lock:
                if not self._late:
                    return
                chosen = self._random.choice(self._late)
            chosen.carry_out()

    def forget(self, operation: LateOperation) -> None:
        with self._lock:
            self._late.remove(operation)

    def transfer(self, request: Request, *, failing: bool) -> None:
        """Move the bytes; a transfer that fails leaves garbage where it should have put them."""
        if failing and request.kind == "read":
            _bytes(request)[:] = GARBAGE
            return
        if failing:
            torn = np.full_like(_bytes(request), GARBAGE)
            request = Request("write", request.file, request.offset, torn)
        self._engine.submit([request])[0].result()

    def close(self) -> None:
        self.carry_out_all()
        self._engine.close()

    def __enter__(self) -> "LateEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes(request: Request) -> npt.NDArray[np.uint8]:
    view: Any = request.buffer
    return np.frombuffer(view, dtype=np.uint8)


def _error(
    request: Request, errno: int, *, action: str = "", nbytes: int | None = None
) -> AioError:
    nbytes = _bytes(request).nbytes if nbytes is None else nbytes
    return AioError(
        f"cannot {action or request.kind} {nbytes} bytes at offset {request.offset} of"
        f" {request.file.path}: {os.strerror(errno)}",
        errno=errno,
        filename=os.fspath(request.file.path),
        offset=request.offset,
        nbytes=nbytes,
    )
