"""Computing away from host memory: an arena on a device, and gradients on their way back.

Weights pass from NVMe through a landing buffer in host memory to the device, each transfer
asynchronous; weights that are kept in HOST go straight to the device. A ``Link`` is the copy engine
between the two memories; ``CudaLink`` uses streams and events and never synchronises the device,
``HostLink`` copies within host memory and makes everything here testable.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aio import Slab, SlabFullError
from aio.errors import let_go
from aio.threads import LOOK_SECONDS, Changes, Latch, Thread, join_thread, start_thread
from swap.cache.arena import Entry
from swap.cache.patience import Patience
from swap.plain import plain
from swap.plan.layout import ParameterSpec
from swap.processors import stay_in_background
from swap.storage.components import as_tensor

_POLL_SECONDS = 0.001
_RELEASE_SECONDS = 2.0
"""How long a gradient waits for memory of one that is stored."""
_NONE = object()


class Link(Protocol):
    """Asynchronous copies between host memory and a device. Events are opaque."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start copying host ``source`` to device ``target``; both must live until the event is
        done.
        """

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start copying device ``source``, as computed so far, to host ``target``."""

    def before_compute(self, event: Any, tensor: torch.Tensor) -> None:
        """What is computed from now on comes after ``event`` and may use ``tensor``."""

    def done(self, event: Any) -> bool:
        """Whether the copy is finished."""

    def wait(self, event: Any) -> None:
        """Block this thread (not the device) until it is."""


class HostLink:
    """A device that is host memory: copies are finished when they return."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def before_compute(self, event: Any, tensor: torch.Tensor) -> None:
        """Nothing runs later."""

    def done(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None:
        """Copies are finished when they return."""


class CudaLink:
    """Copies on two streams of their own, one each way; host memory should be registered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # From the upload stream's pool: memory that compute still uses is not handed out, because
        # before_compute tells the allocator of that use.
        with torch.cuda.stream(self._up):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._up)
        return event

    def download(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._down)
        source.record_stream(self._down)
        return event

    def before_compute(self, event: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        if event is not None:
            stream.wait_event(event)
        tensor.record_stream(stream)

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


def register_with_cuda(slab: Slab) -> Callable[[], Any]:
    """Pin a slab for fast copies, by address; returns what undoes it, due before it is closed.

    Raises ``RuntimeError`` with CUDA's reason.
    """
    runtime = torch.cuda.cudart()
    address = slab.address
    code = runtime.cudaHostRegister(address, slab.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"cannot register {slab.nbytes} bytes of host memory with CUDA (error {int(code)}); "
            "give less host_memory, or raise the limit on locked memory"
        )
    return lambda: runtime.cudaHostUnregister(address)


class DeviceArena:
    """Entries are tensors of the device, at most ``nbytes`` of them; reads land in host memory
    first.
    """

    uses_home = False

    def __init__(self, link: Link, nbytes: int, landing: Slab | None) -> None:
        self._link = link
        self._nbytes = nbytes
        self._landing = landing
        self._held: list[tuple[StorageWeakRef, int]] = []
        self._uploads: deque[tuple[Any, torch.Tensor]] = deque()
        self._peak_bytes = 0
        self._lock = threading.RLock()  # guards the three above
        self._seen = threading.local()  # .used_bytes: when the thread was last refused

    def new(self, spec: ParameterSpec, *, landing: bool, apart: bool = False) -> Entry:
        """Where entries lie on the device is for its allocator to say; what lands here leaves."""
        nbytes = spec.weight_bytes
        with self._lock:
            used_bytes = self._seen.used_bytes = self.used_bytes
            if used_bytes + nbytes > self._nbytes:
                raise SlabFullError(nbytes, self._nbytes - used_bytes, 0)
            entry = Entry(spec=spec, weight=torch.empty(0, device="cpu"))
            if landing:
                self._drop_finished_uploads()
                assert self._landing is not None
                buffer = self._landing.allocate(spec.padded_numel * spec.dtype.itemsize)
                entry.landing = as_tensor(buffer, spec.dtype)
            entry.weight = self._link.empty(spec.numel, spec.dtype)
            self._held.append((StorageWeakRef(entry.weight.untyped_storage()), nbytes))
            self._peak_bytes = max(self._peak_bytes, used_bytes + nbytes)
        return entry

    def fill(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        self._upload(entry, start, values)
        with self._lock:  # an entry that is dropped keeps its memory until this is over
            self._drop_finished_uploads()
            self._uploads.append((entry.event, values))

    def put(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        self._upload(entry, start, values)
        self._link.wait(entry.event)

    def _upload(self, entry: Entry, start: int, values: torch.Tensor) -> None:
        entry.event = self._link.upload(entry.weight[start : start + values.numel()], values)

    def arrived(self, entry: Entry) -> None:
        if entry.landing is None:
            return
        for start, length in entry.landed:
            part = slice(start, start + length)
            entry.event = self._link.upload(entry.weight[part], entry.landing[part])
        with self._lock:
            self._uploads.append((entry.event, entry.landing))
        entry.landing = None

    def ready(self, entry: Entry) -> torch.Tensor:
        self._link.before_compute(entry.event, entry.weight)
        return entry.weight

    def wait_for_release(self, timeout: float) -> bool:
        """See ``Arena``. Nobody tells when device memory is dropped, so that is looked for."""
        deadline = time.monotonic() + timeout
        while not (self._finish_upload() or self._has_less_in_use()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _finish_upload(self) -> bool:
        with self._lock:
            event = self._uploads[0][0] if self._uploads else _NONE
        if event is _NONE:
            return False
        self._link.wait(event)
        with self._lock:
            self._drop_finished_uploads()
        return True

    def _has_less_in_use(self) -> bool:
        if self._landing is not None and self._landing.wait_for_release(0.0):
            return True
        return self.used_bytes < getattr(self._seen, "used_bytes", 0)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of entries whose memory is still referred to, by us or by autograd."""
        with self._lock:
            self._held = [held for held in self._held if not held[0].expired()]
            return sum(nbytes for _, nbytes in self._held)

    @property
    def peak_bytes(self) -> int:
        with self._lock:
            return self._peak_bytes

    def _drop_finished_uploads(self) -> None:
        while self._uploads and self._link.done(self._uploads[0][0]):
            self._uploads.popleft()


class GradientInbox:
    """Gradients from a device: copied to host buffers behind the backward pass, stored by a thread.

    ``slab`` bounds the copies in flight; ``add`` waits for room in it. ``store`` takes a gradient
    that has arrived; ``lose`` is told of one that could not be copied or stored, and why.

    ``_pending`` is the only record of what is under way, its head being what the thread works on:
    an interrupt has no moment in which a gradient is counted and not there.
    """

    def __init__(
        self,
        link: Link,
        slab: Slab,
        store: Callable[[int, torch.Tensor], None],
        lose: Callable[[int, BaseException], None],
    ) -> None:
        self._link = link
        self._slab = slab
        self._store = store
        self._lose = lose
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()
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
        """Start moving ``gradient`` to the store; it may be freed on return.

        Raises ``SlabFullError`` for one that is larger than the inbox, and what the link raises;
        then it is lost.
        """
        try:
            flat = plain(gradient.detach()).reshape(-1)
            buffer = as_tensor(self._allocate(flat.numel() * flat.dtype.itemsize), flat.dtype)
            self._pending.append((parameter, buffer, self._link.download(buffer, flat)))
        except BaseException as failure:
            self._lose(parameter, let_go(failure))
            raise
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
            self._finish_one()
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

    def _finish_one(self) -> None:
        parameter, buffer, event = self._pending[0]
        try:
            self._link.wait(event)
            self._store(parameter, buffer)
        except BaseException as failure:
            # Frames would keep the buffer, and ``add`` would wait for that for ever.
            self._lose(parameter, let_go(failure))
