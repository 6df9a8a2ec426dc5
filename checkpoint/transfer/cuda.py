"""Copies between host memory and CUDA devices, on streams of their own.

Each device has a stream for each direction, which live as long as the process: memory that torch
takes for a stream is used again on that stream alone. A stream waits for events of the program's
streams, never the program's for it: whoever needs a copy waits for it on the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from checkpoint.format.datafile import align_up
from checkpoint.tensors.copiers import NO_DEVICES, Buffer, Copier

logger = logging.getLogger(__name__)


class _Streams(NamedTuple):
    """Of one device: from it, and to it."""

    down: torch.cuda.Stream
    up: torch.cuda.Stream


_streams: dict[int, _Streams] = {}
_lock = threading.Lock()


def copier_of_caller(*, follows: bool = False) -> Copier:
    """The copier for a call of this thread.

    Copies of one that `follows` come after all that is on the streams of the caller, who waits,
    when they are begun: a load makes memory there meanwhile.
    """
    if not torch.cuda.is_initialized():
        return NO_DEVICES
    used = filter(_is_used, range(torch.cuda.device_count()))
    return CudaCopier({device: torch.cuda.current_stream(device) for device in used}, follows)


def _is_used(device: int) -> bool:
    """Whether this process has anything on a device: to ask more of one makes CUDA take memory."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or bool(has_context(device))


class CudaCopier:
    """A `Copier` behind the streams that a caller has, by device."""

    def __init__(self, callers: Mapping[int, torch.cuda.Stream], follows: bool) -> None:
        self._callers = callers
        self._follows = follows
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._registered: list[tuple[int, Sequence[Buffer]]] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        for device in {tensor.get_device() for tensor in tensors}:
            self.streams_of(device)

    def streams_of(self, device: int) -> _Streams:
        """Of a device, behind what comes before the copies."""
        streams = _streams_of(device)
        with self._lock:
            if self._follows or device not in self._begun:
                # On a device without a caller's stream the program has nothing.
                caller = self._callers.get(device) or torch.cuda.default_stream(device)
                event = caller.record_event()
                for stream in streams:
                    stream.wait_event(event)
                self._begun.add(device)
        return streams

    def finish_caller(self) -> None:
        for stream in self._callers.values():
            stream.synchronize()

    @contextmanager
    def _as_caller(self) -> Iterator[None]:
        with ExitStack() as streams:
            for device, stream in self._callers.items():
                if stream != torch.cuda.current_stream(device):
                    streams.enter_context(torch.cuda.stream(stream))
            yield

    def as_caller(self) -> AbstractContextManager[None]:
        return self._as_caller()

    def register(self, buffers: Sequence[Buffer]) -> None:
        runtime: Any = torch.cuda.cudart()
        for address, nbytes, parts in _in_a_row(buffers):
            # Portable: every device knows it.
            code = int(runtime.cudaHostRegister(address, nbytes, 1))
            if code:
                logger.warning(
                    "CUDA does not register %d bytes of host memory (error %d); copies go through "
                    "memory of its driver, at about half the speed: raise the limit on locked "
                    "memory (ulimit -l)",
                    nbytes,
                    code,
                )
                _forget_error()
                continue
            with self._lock:
                self._registered.append((address, parts))

    def transfers(self) -> CudaTransfers:
        return CudaTransfers(self)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        transfers = self.transfers()
        transfers.copy(target, source)
        transfers.wait()

    def close(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, set()
            registered, self._registered = self._registered, []
        runtime: Any = torch.cuda.cudart() if registered else None
        try:
            for device in begun:
                for stream in _streams_of(device):
                    _wait(stream)
        finally:
            for address, _ in registered:
                runtime.cudaHostUnregister(address)


class CudaTransfers:
    """Copies of one thread."""

    def __init__(self, copier: CudaCopier) -> None:
        self._copier = copier
        self._streams: dict[int, _Streams] = {}
        self._used: dict[torch.cuda.Stream, None] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        is_up = target.is_cuda
        device = (target if is_up else source).get_device()
        if device not in self._streams:
            self._streams[device] = self._copier.streams_of(device)
        streams = self._streams[device]
        stream = streams.up if is_up else streams.down
        self._used[stream] = None
        with torch.cuda.stream(stream):
            # On the device, before or after the copy: none else leaves the copy engine alone with
            # it, and what a copy would do on the host it would do before the bytes are there.
            if is_up and source.dtype != target.dtype:
                source = source.to(target.device, non_blocking=True)
            elif not is_up:
                source.record_stream(stream)
                source = source.resolve_conj().resolve_neg().contiguous()
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        used, self._used = list(self._used), {}
        for stream in used:
            _wait(stream)


def _streams_of(device: int) -> _Streams:
    with _lock:
        if device not in _streams:
            _streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
        return _streams[device]


def _wait(stream: torch.cuda.Stream) -> None:
    """For all that a stream has been given, without spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def _forget_error() -> None:
    """The next kernel would be told of it as if it were its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _in_a_row(buffers: Sequence[Buffer]) -> Iterator[tuple[int, int, list[Buffer]]]:
    """Ranges of whole pages that buffers lie in: address, bytes, and the buffers."""
    ranges: list[tuple[int, int, list[Buffer]]] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.ctypes.data):
        address, nbytes = buffer.ctypes.data, align_up(buffer.nbytes)
        if ranges and sum(ranges[-1][:2]) == address:
            begin, before, parts = ranges.pop()
            ranges.append((begin, before + nbytes, [*parts, buffer]))
        else:
            ranges.append((address, nbytes, [buffer]))
    yield from ranges
