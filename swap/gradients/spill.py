"""Spilled gradients on their way to the SSD, chunk by chunk through a small slab.

A chunk keeps its buffer until its write has succeeded, because until then that part of the gradient
is nowhere else. The error of a failed write is raised, and the write is submitted again at the next
wait for it: an error costs a retry and never a gradient.

Invariant: of two writes to the same bytes the second is submitted when the first has ended, also
when an interrupt (Ctrl-C) came before the first was recorded.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from aio import AioError, Operation, Slab, SlabFullError
from aio.errors import advise
from swap.cache.patience import Patience
from swap.plan.layout import PIECE, Segment
from swap.storage.components import as_bytes, as_tensor
from swap.storage.extents import Extent, ExtentStore
from swap.timeline import Timeline

_RELEASE_SECONDS = 60.0
"""How long a new chunk waits for memory that someone is about to let go of."""
AGAIN = "call optimizer.zero_grad() and run the backward passes of this step again"
_UNWRITTEN = (
    "these are spilled gradients, which are kept: mend that, then call offloaded.flush() to have "
    f"them written, or, to let go of them, {AGAIN}"
)


@dataclass(slots=True, eq=False)
class _Chunk:
    """``values``, whole pieces, for byte ``start`` of ``extent``."""

    segment: Segment
    extent: Extent
    start: int
    values: torch.Tensor
    operation: Operation
    has_failed: bool = False
    """Whether it is written again, as a write before has failed."""
    is_wanted: bool = True
    """Whether its values are of use; if not, a write that fails is nobody's concern."""


class SpillWriter:
    """Buffers for chunks, and their writes. Thread-safe."""

    def __init__(self, slab: Slab, extents: ExtentStore, timeline: Timeline) -> None:
        self._slab = slab
        self._extents = extents
        self._timeline = timeline
        self._chunks: list[_Chunk] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for ``numel`` elements in whole pieces; waits for earlier writes to give one
        back, and raises ``AioError`` when one of them failed.
        """
        nbytes = -(-numel // PIECE) * PIECE * dtype.itemsize
        patience = Patience(_RELEASE_SECONDS)
        while True:
            with contextlib.suppress(SlabFullError):
                return as_tensor(self._slab.allocate(nbytes), dtype)
            finished = self._finish_some()
            if finished:
                _raise_first(finished)
            elif not patience.waits(self._slab.wait_for_release):
                raise _held_elsewhere(nbytes, self._slab)

    def write(self, segment: Segment, extent: Extent, start: int, values: torch.Tensor) -> None:
        """Start writing a buffer, which is the writer's from now on."""

        def begin() -> None:
            operation = self._submit(segment, extent, start, values)
            self._chunks.append(_Chunk(segment, extent, start, values, operation))

        with self._lock:
            self._extents.run_drained(begin)

    def wait_for(self, subgroup: int) -> None:
        """Wait until all chunks of ``subgroup`` are on the SSD; raises ``AioError``."""
        self._wait(lambda segment: segment.subgroup == subgroup)

    def wait_for_segment(self, segment: Segment) -> None:
        """As ``wait_for``, for one parameter's part of a subgroup."""
        self._wait(lambda other: other == segment)

    def wait_for_all(self) -> None:
        """As ``wait_for``, for every subgroup."""
        self._wait(lambda _: True)

    def discard(self, segment: Segment) -> None:
        """Let the writes of ``segment`` end, whatever becomes of them: new values replace these."""
        for chunk in self._select(lambda other: other == segment):
            self._end(chunk)

    def forget(self, parameters: Collection[int]) -> None:
        """The gradients of ``parameters`` are of no use any more. What has failed of them is not
        written again, and a disk that takes no writes keeps nobody from going on without them.
        """
        for chunk in self._select(lambda segment: segment.parameter in parameters):
            self._give_up(chunk)
            if chunk.has_failed:
                self._end(chunk)

    def _give_up(self, chunk: _Chunk) -> Operation:
        """From now on nobody writes it again; gives the last write of it."""
        with self._lock:
            chunk.is_wanted = False
            return chunk.operation

    def _end(self, chunk: _Chunk) -> None:
        """Let the last write of ``chunk`` end, and go of it."""
        operation = self._give_up(chunk)
        operation.abandon()
        self._remove(chunk, operation)

    def _wait(self, wanted: Callable[[Segment], bool]) -> None:
        outcomes = self._finish_all(wanted)
        if any(outcomes):  # a disk that was full failed others too: one error is for all of them
            outcomes += self._finish_all(lambda segment: not wanted(segment))
        _raise_first(outcomes)

    def _finish_all(self, wanted: Callable[[Segment], bool]) -> list[AioError | None]:
        return [self._finish(chunk) for chunk in self._select(wanted)]

    def _finish_some(self) -> list[AioError | None]:
        """Finish the chunks that are written, or else the oldest; empty when there is none."""
        chunks = self._select(lambda _: True)
        written = [chunk for chunk in chunks if chunk.operation.done()]
        return [self._finish(chunk) for chunk in written or chunks[:1]]

    def _finish(self, chunk: _Chunk) -> AioError | None:
        """Wait for ``chunk`` and let go of it; after a failure it is written again instead.

        The failure is returned bare: with a traceback it would keep buffers for as long as
        somebody keeps the exception.
        """
        operation = chunk.operation
        try:
            operation.result()
        except AioError as error:
            if self._write_again(chunk, operation):
                return error.with_traceback(None)
        self._remove(chunk, operation)
        return None

    def _write_again(self, chunk: _Chunk, failed: Operation) -> bool:
        """Unless another thread has. False for what another one, or this, has given up."""

        def begin() -> None:
            chunk.has_failed = True
            chunk.operation = self._submit(chunk.segment, chunk.extent, chunk.start, chunk.values)

        with self._lock:
            if chunk.is_wanted and chunk.operation is failed:
                self._extents.run_drained(begin)
            return chunk.is_wanted

    def _select(self, wanted: Callable[[Segment], bool]) -> list[_Chunk]:
        with self._lock:
            return [chunk for chunk in self._chunks if wanted(chunk.segment)]

    def _remove(self, chunk: _Chunk, ended: Operation) -> None:
        """When ``ended`` was its last write: what is under way is known, and waited for."""
        with self._lock:
            if chunk in self._chunks and chunk.operation is ended:
                self._chunks.remove(chunk)

    def _submit(
        self, segment: Segment, extent: Extent, start: int, values: torch.Tensor
    ) -> Operation:
        write = self._extents.write(extent, start, as_bytes(values))
        label = f"gradients of subgroup {segment.subgroup}"
        return self._timeline.watch(write, label, purpose="gradients")


@contextlib.contextmanager
def advised() -> Iterator[None]:
    """Gradients that no step has taken are waited for inside."""
    try:
        yield
    except AioError as failure:
        advise(failure, _UNWRITTEN)
        raise


def _held_elsewhere(nbytes: int, slab: Slab) -> AioError:
    return AioError(
        f"no room for {nbytes} bytes of a gradient on its way to NVMe: all {slab.nbytes} bytes for "
        f"that have been held for {_RELEASE_SECONDS:g} seconds, and no write of them is under way; "
        "let go of errors that are kept (in a variable, by a debugger, as sys.last_traceback): "
        "their tracebacks hold the memory",
        errno=errno.ENOBUFS,
        nbytes=nbytes,
    )


def _raise_first(outcomes: list[AioError | None]) -> None:
    """``outcomes`` is empty then: an error's traceback leads to who has it."""
    failures = [failure for failure in outcomes if failure is not None]
    outcomes.clear()
    if failures:
        raise failures.pop(0)
