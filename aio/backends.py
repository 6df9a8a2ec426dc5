"""Which backend an engine gets, and why not another one."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from aio._native import ffi, lib
from aio.errors import AioError, check_flag, check_int
from aio.process.threads import NO_MORE_THREADS

Backend = Literal["auto", "libaio", "io_uring", "posix", "memory"]


def _names() -> Iterator[str]:
    """Of all backends that there are, by their numbers."""
    number = 0
    while name := lib.aio_backend_name(number):
        yield ffi.string(name).decode()
        number += 1


NAMES = tuple(_names())
# What "auto" tries, best first; posix always works.
_PREFERENCE = NAMES[: NAMES.index("posix") + 1]
# What has nothing to do with a backend: it would only be met again, with the first file.
_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_SHORTAGES = (*_DESCRIPTORS, lib.AIO_NO_THREAD)
_MAX_BLOCK_BYTES = 1 << 30
_AIO_LIMIT = Path("/proc/sys/fs/aio-max-nr")
_AIO_USED = Path("/proc/sys/fs/aio-nr")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBackend:
    """The backend "memory" with faults, for tests.

    It moves bytes between buffers and the page cache in the lane's thread, in a random order.
    Same seed and same requests, same faults. Probabilities are per block, 0 to 1.
    """

    seed: int = 0
    short_transfer: float = 0.0
    """A part of the block is moved only."""
    again: float = 0.0
    """Nothing is moved, EAGAIN."""
    interrupted: float = 0.0
    """Nothing is moved, EINTR."""
    short_submit: float = 0.0
    """A block that was to be submitted stays queued."""
    refuse_direct: bool = False
    """Direct I/O results in EINVAL, as on a file system that only claims to have it."""
    error: float = 0.0
    """Nothing is moved, `errno`."""
    errno: int = errno.EIO
    gate: int = -1
    """A descriptor: while it is not readable, no block completes. -1: no gate."""

    def __post_init__(self) -> None:
        for name in ("short_transfer", "again", "interrupted", "short_submit", "error"):
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number")
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} is not a probability")
        for name in ("seed", "errno", "gate"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        is_refused = check_flag("refuse_direct", self.refuse_direct)
        object.__setattr__(self, "refuse_direct", is_refused)  # for C


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of an engine; see Engine."""

    queue_depth: int
    block_bytes: int
    lanes: int
    max_pending_bytes: int

    def __post_init__(self) -> None:
        for name in ("queue_depth", "block_bytes", "lanes", "max_pending_bytes"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        if not 1 <= self.queue_depth <= 4096:
            raise ValueError(f"queue_depth={self.queue_depth} is not between 1 and 4096")
        if not 1 <= self.lanes <= 256:
            raise ValueError(f"lanes={self.lanes} is not between 1 and 256")
        if self.block_bytes < page_bytes or self.block_bytes % page_bytes:
            raise ValueError(
                f"block_bytes={self.block_bytes} is not a multiple of {page_bytes}, the page size"
            )
        if self.block_bytes > _MAX_BLOCK_BYTES:
            raise ValueError(
                f"block_bytes={self.block_bytes} is more than {_MAX_BLOCK_BYTES}, about the most"
                " that Linux moves in one transfer"
            )
        if not 1 <= self.max_pending_bytes < 1 << 63:
            raise ValueError(
                f"max_pending_bytes={self.max_pending_bytes} is not between 1 and 2**63 - 1"
            )


class Started(NamedTuple):
    """A C engine that runs. `rejected` are (backend, reason), best first.

    `slot` points to the engine, and frees it with its last reference.
    """

    slot: Any
    backend: str
    detail: str
    rejected: tuple[tuple[str, str], ...]


def start(backend: Backend | MemoryBackend, limits: Limits) -> Started:
    """Starts a C engine on the backend asked for, or with "auto" on the best that works.

    Raises ValueError for an unknown backend and AioError when it cannot be set up.
    """
    faults = backend if isinstance(backend, MemoryBackend) else MemoryBackend()
    name = "memory" if isinstance(backend, MemoryBackend) else backend
    if not isinstance(name, str):
        raise TypeError(f"backend is a {type(name).__name__}, neither a name nor a MemoryBackend")
    if name != "auto" and name not in NAMES:
        known = ", ".join(["auto", *NAMES])
        raise ValueError(f"backend={name!r} is not one of {known}")
    rejected: list[tuple[str, str]] = []
    for candidate in _PREFERENCE if name == "auto" else (name,):
        slot, code = _create(candidate, limits, faults)
        if not code:
            detail = ffi.string(lib.aio_backend_detail(NAMES.index(candidate))).decode()
            return Started(slot, candidate, detail, tuple(rejected))
        rejected.append((candidate, _explain(candidate, code, limits)))
        if code in _SHORTAGES:
            break
    raise AioError(
        f"cannot start an engine with backend {candidate}: {rejected[-1][1]}",
        errno=errno.EAGAIN if code == lib.AIO_NO_THREAD else code,
    )


def _create(name: str, limits: Limits, faults: MemoryBackend) -> tuple[Any, int]:
    config = ffi.new("aio_config *")
    config.backend = NAMES.index(name)
    config.lanes = limits.lanes
    config.queue_depth = limits.queue_depth
    config.block_bytes = limits.block_bytes
    config.max_pending_bytes = limits.max_pending_bytes
    config.faults.seed = faults.seed & (1 << 64) - 1
    config.faults.short_transfer = faults.short_transfer
    config.faults.again = faults.again
    config.faults.interrupted = faults.interrupted
    config.faults.short_submit = faults.short_submit
    config.faults.refuse_direct = faults.refuse_direct
    config.faults.error = faults.error
    config.faults.error_number = faults.errno
    config.faults.gate_fd = faults.gate
    # Freed with the slot, so that there is no moment in which an engine belongs to nobody; and by
    # C, as Python would swallow an interrupt of its own.
    slot = ffi.gc(ffi.new("aio_engine **"), lib.aio_engine_drop)
    code = -lib.aio_engine_create(config, slot)
    return slot, code


def _explain(name: str, code: int, limits: Limits) -> str:
    """Why a backend could not be set up, and what to do about it."""
    reason = os.strerror(code)
    if name == "libaio" and code == errno.EAGAIN:
        return (
            f"{reason}: {limits.lanes} lanes of depth {limits.queue_depth} do not fit under"
            f" fs.aio-max-nr ({_number(_AIO_USED)} of {_number(_AIO_LIMIT)} events are taken);"
            " raise it, or use fewer lanes or a smaller queue_depth"
        )
    if code == lib.AIO_NO_THREAD:
        return (
            f"{os.strerror(errno.EAGAIN)}: each of {limits.lanes} lanes takes a thread, and"
            f" {NO_MORE_THREADS}, or use fewer lanes"
        )
    if code in _DESCRIPTORS:
        return f"{reason}: a lane takes up to two; close some, or raise RLIMIT_NOFILE (ulimit -n)"
    if code in (errno.ENOSYS, errno.EPERM):
        return f"{reason}: this kernel or container does not allow it"
    if name == "io_uring" and code == errno.ENOMEM:
        return f"{reason}: before Linux 5.12 its rings count against RLIMIT_MEMLOCK (ulimit -l)"
    return reason


def _number(path: Path) -> str:
    try:
        return path.read_bytes().strip().decode()
    except OSError:
        return "?"
