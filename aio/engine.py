"""The engine: lanes of I/O that run without the GIL, and what they are."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aio._core import Core
from aio._native import ffi, lib
from aio.backends import Backend, Limits, MemoryBackend, start
from aio.errors import check_int, check_path
from aio.files import MAX_OFFSET, File
from aio.opening import MODES, Mode, warn_buffered
from aio.operation import Operation, Request
from aio.process.descriptors import Descriptor
from aio.process.unasked import tell

if TYPE_CHECKING:
    from aio.operation import BufferLike

logger = logging.getLogger(__name__)

_told: set[tuple[str, str]] = set()
"""Why there is no kernel queue, (backend, reason), as far as this process was warned of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine runs on. str() is for people."""

    backend: str
    detail: str
    """How the backend reaches the kernel; may be empty."""
    rejected: tuple[tuple[str, str], ...]
    """Backends that "auto" would have preferred, and why it could not: (name, reason)."""
    lanes: int
    queue_depth: int
    block_bytes: int
    max_pending_bytes: int

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        lines = [
            f"{self.backend}{detail}, {self.lanes} lanes, each with {self.queue_depth} blocks of"
            f" {self.block_bytes} bytes in flight and {self.max_pending_bytes} bytes pending"
        ]
        lines += [f"not {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


class Engine:
    """Reads and writes files in the background, at the speed of their devices.

    A lane is a queue with a C thread of its own. It cuts requests into blocks of `block_bytes`
    and keeps `queue_depth` of them in flight. Requests that do not fit wait in the lane, up to
    `max_pending_bytes` of them (a single larger one is let in alone); above that, submitting
    blocks, without the GIL, until there is room.

    backend: "auto" takes the best that works here and describe() says which and why; it falls
    back to "posix" with one warning. Naming one takes that one or fails.

    Raises TypeError for what is no int and no backend, ValueError for sizes that cannot work,
    AioError when the backend cannot be set up.

    Memory: none of its own, except eight blocks a lane once it has met a buffer whose address the
    device cannot take (see File.memory_alignment).

    Thread-safe. From submit until the completion is reaped the engine holds the buffer, whatever
    the caller does. Requests that are in flight together and overlap, one of them a write, give
    bytes of either, and File.sync() may fail; those that share no byte never disturb one another.
    While a file is written nobody should read it through the page cache at the same time: the
    kernel may then lose track of which copy is the newer one, and File.sync() fails.
    """

    def __init__(
        self,
        backend: Backend | MemoryBackend = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        lanes: int = 1,
        *,
        max_pending_bytes: int = 1 << 30,
    ) -> None:
        limits = Limits(
            queue_depth=queue_depth,
            block_bytes=block_bytes,
            lanes=lanes,
            max_pending_bytes=max_pending_bytes,
        )
        started = start(backend, limits)
        cause = started.rejected[-1] if started.backend == "posix" and started.rejected else None
        if cause is not None and cause not in _told:
            _told.add(cause)
            logger.warning(
                "no kernel queue for I/O (%s: %s), so each block takes a thread of its own, which"
                " costs processor time and some of the device's speed",
                *cause,
            )
        self._limits = limits
        self._started = started._replace(slot=None)
        # An engine that was let go of finishes in the background; at exit aio._core waits for it.
        # C stops it: an interrupt in a finalizer of Python's would be swallowed.
        self._leave: Any = ffi.gc(started.slot, lib.aio_engine_leave)
        self._core = Core(started.slot)

    @property
    def lanes(self) -> int:
        return self._limits.lanes

    def describe(self) -> EngineDescription:
        return EngineDescription(
            backend=self._started.backend,
            detail=self._started.detail,
            rejected=self._started.rejected,
            lanes=self._limits.lanes,
            queue_depth=self._limits.queue_depth,
            block_bytes=self._limits.block_bytes,
            max_pending_bytes=self._limits.max_pending_bytes,
        )

    def open(
        self, path: str | os.PathLike[str], mode: Mode = "r", *, size: int | None = None
    ) -> File:
        """Opens a file for this engine, with direct I/O where the file system has it.

        mode: "r" reads, "r+" reads and writes what exists, "w" creates or truncates, "x" creates
        what must not exist. `size` reserves that many bytes and makes the file at least as long.

        Raises what os.open raises for the path (FileNotFoundError, FileExistsError, ...), also when
        it is the descriptor for direct I/O that there are too many of; AioError when the space
        cannot be reserved; ValueError for a mode, a size or a block_bytes that cannot work, and for
        what is neither a regular file nor a block device. A file that was created is removed then,
        and one that was there is emptied last, once only reserving can still fail.
        """
        tell()
        self._core.check_usable()
        check_path("path", path)
        name = os.fspath(path)
        if not name or name.endswith(("/", "/.")):  # as a Path it would be that of something else
            Descriptor(name, os.O_PATH).close()
        if size is not None:
            size = check_int("size", size)
        if mode not in MODES:
            raise ValueError(f'mode={mode!r} is not one of "r", "r+", "w" and "x"')
        if size is not None and (mode == "r" or not 0 <= size <= MAX_OFFSET):
            raise ValueError(f'size={size} cannot be reserved in {path} with mode "{mode}"')
        file = File(self._core, Path(path), mode)
        try:
            file.open(self._limits.block_bytes)
            if not file.direct:
                warn_buffered(file.device, file.path.parent, file.direct_reason)
            file.begin(size)
            return file
        except BaseException as error:
            file.abandon(error)
            raise

    def read(
        self, file: File, offset: int, buffer: "BufferLike", *, lane: int | None = None
    ) -> Operation:
        """Fills `buffer`, writable and contiguous, from `offset` on. See submit."""
        return self.submit([Request("read", file, offset, buffer)], lane=lane)[0]

    def write(
        self, file: File, offset: int, buffer: "BufferLike", *, lane: int | None = None
    ) -> Operation:
        """Writes all of `buffer` from `offset` on; do not change it before the end. See submit."""
        return self.submit([Request("write", file, offset, buffer)], lane=lane)[0]

    def submit(self, requests: Sequence[Request], *, lane: int | None = None) -> list[Operation]:
        """Queues a batch of requests and returns an Operation for each, in order.

        `lane` pins the batch to one lane, 0 to lanes - 1; None gives each request to the lane with
        the fewest bytes pending. The lanes start requests in order and finish them in any.

        Writes beyond the end of the file first reserve what they add to it, so that a full disk
        is met before the first byte; after an error the file may have been made longer.

        Nothing is queued when this raises: TypeError for a buffer that cannot be used, ValueError
        for a bad offset, lane or file and on a closed engine, RuntimeError after a fork,
        MemoryError. Errors of the transfers themselves are raised by Operation.result().
        """
        if lane is not None:
            lane = check_int("lane", lane)
            if not 0 <= lane < self.lanes:
                raise ValueError(f"lane={lane} is not between 0 and {self.lanes - 1}")
        return self._core.submit(requests, -1 if lane is None else lane)

    def drain(self) -> None:
        """Waits until every request that it has now has ended, in success or failure.

        For who may have lost an operation: an interrupt (Ctrl-C) can come between `submit` and the
        caller's hold on what it returned. Raises RuntimeError as Operation.result() does.
        """
        self._core.drain()

    def close(self) -> None:
        """Refuses new requests, waits for those it has, and frees everything. Idempotent.

        Files stay open until they are closed. In a callback it does not wait; in a forked child
        it does nothing. At interpreter exit every engine is closed; one that is garbage-collected
        finishes what it has in the background.
        """
        self._core.close()
        self._leave = None
        tell()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self._started.backend}, {self.lanes} lanes>"
