"""Writes data files: one thread per file takes filled buffers, submits them, and gives them back to
be filled again when their writes have completed.

Where the buffers come from is a supply's matter: filled on the same thread as they become free, or
ahead of the writing. Follows FastPersist's double buffering.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from aio import Engine, File, Operation, Slab
from checkpoint.errors import ChangedTensorError
from checkpoint.plan.write_runs import Run, Slots
from checkpoint.sheltered import Cancellation, StoppedError
from checkpoint.tensors.copiers import Buffer
from checkpoint.threads import Outcome, Workers, run_all
from checkpoint.transfer.filling import Filler

_MAX_DIRECT_IN_FLIGHT = 4

_READERS = 4
"""Threads that read sources of a file ahead of its writing."""

Runs = Generator[tuple["Run", "Buffer | None"], None, None]
Reap = Callable[[], bool]
"""Waits for the oldest write of a file and gives its buffer back; False if none is in flight."""


class Supply(Protocol):
    """The runs of one file, copied into buffers, summed, in order."""

    filler: Filler

    def runs(self, file: File, reap: Reap) -> Runs:
        """Every run with the buffer that holds it; without one, a direct run.

        Ends, or is closed, when no source of the file will be read again. Raises what a source
        raises.
        """
        ...

    def take_back(self, buffer: Buffer) -> None:
        """A buffer whose write has completed."""
        ...

    def stop(self) -> None:
        """Nothing will be taken any more. Idempotent, from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Coming:
    """A run on its way to the writer: in a buffer when that is filled, or direct."""

    run: Run
    buffer: Buffer | None = None
    filled: Outcome[None] | None = None

    @property
    def is_here(self) -> bool:
        return self.filled is None or self.filled.is_there()


class FillingSupply:
    """Fills buffers as they become free: on the thread that writes, or, of sources that have to be
    read, ahead of it, several at once: a device gives little to who waits for each read.
    """

    def __init__(self, filler: Filler, slots: Slots, slab: Slab) -> None:
        self.filler = filler
        self._slots = slots
        self._free = [slab.allocate(slots.nbytes) for _ in range(slots.count)]
        if filler.has_to_copy:
            filler.copier.register(self._free)

    def runs(self, file: File, reap: Reap) -> Runs:
        alignment = file.memory_alignment if file.direct else 0
        runs = self.filler.runs(self._slots.nbytes, alignment)
        if self.filler.has_to_read:
            yield from self._read_ahead(runs, reap)
            return
        for run in runs:
            if run.direct:
                yield run, None
                continue
            while not self._free:
                reap()
            buffer = self._free.pop()
            self.filler.fill(run, buffer)
            yield run, buffer

    def _read_ahead(self, runs: Iterator[Run], reap: Reap) -> Runs:
        coming: deque[_Coming] = deque()
        with Workers(_READERS, "checkpoint-fill") as workers:
            for run in runs:
                while coming and coming[0].is_here:
                    yield self._taken(coming.popleft())
                if run.direct:
                    coming.append(_Coming(run))
                    continue
                while not self._free:
                    if coming and (coming[0].is_here or not reap()):
                        yield self._taken(coming.popleft())
                    elif not coming:
                        reap()
                buffer = self._free.pop()
                filled = workers.submit(partial(self.filler.copy, run, buffer))
                coming.append(_Coming(run, buffer, filled))
            while coming:
                yield self._taken(coming.popleft())

    def _taken(self, coming: _Coming) -> tuple[Run, Buffer | None]:
        """The next run, once it is there. Raises what a source raised."""
        if coming.filled is not None and coming.buffer is not None:
            coming.filled.result()
            self.filler.sum(coming.run, coming.buffer)
        return coming.run, coming.buffer

    def take_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def stop(self) -> None:
        """What is being read ends as the writer lets go of the runs."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """One open data file, what goes into it, and the lane that writes it."""

    supply: Supply
    file: File
    lane: int


class Writer:
    """Writes a set of data files; one use. Their fillers then hold the checksums.

    `on_staged` is called once, from any thread, when no source will be read again: not before the
    writes have ended that take their bytes from where a source lies.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[FileJob],
        on_staged: Callable[[], None] | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._on_staged = on_staged
        self._cancellation = cancellation or Cancellation()
        self._unstaged = len(jobs)
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Writes everything and checks every completion.

        Raises the first error of a source or of the engine, when nothing is in flight any more, and
        StoppedError when it is to stop.
        """
        tasks = [partial(self._write, job) for job in self._jobs]
        run_all(tasks, self._stop, "checkpoint-write")

    def _stop(self) -> None:
        self._stopped.set()
        for job in self._jobs:
            job.supply.stop()

    def _write(self, job: FileJob) -> None:
        stream = _Stream(self._engine, job)
        try:
            with closing(job.supply.runs(job.file, stream.reap)) as runs:
                for run, buffer in runs:
                    self._check_stopped()
                    stream.submit(run, buffer)
            # A source that is written from where it lies is read until its writes have ended.
            stream.reap_direct()
            self._staged()
            while stream.reap():
                continue
        except BaseException:
            self._stop()
            stream.abandon()
            raise

    def _check_stopped(self) -> None:
        self._cancellation.check()
        if self._stopped.is_set():
            raise StoppedError

    def _staged(self) -> None:
        with self._lock:
            self._unstaged -= 1
            is_last = self._unstaged == 0
        if is_last and self._on_staged is not None:
            self._on_staged()


@dataclass(slots=True)
class _InFlight:
    """A write, with the buffer that it takes its bytes from or, if that is direct, their sum."""

    operation: Operation
    run: Run
    buffer: Buffer | None
    crc: int = 0


@dataclass(slots=True)
class _Stream:
    """The writes of one file that are in flight, oldest first."""

    engine: Engine
    job: FileJob
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _num_direct: int = 0

    def submit(self, run: Run, buffer: Buffer | None) -> None:
        while self._in_flight and self._in_flight[0].operation.done():
            self.reap()
        if buffer is not None:
            operation = self._write(run, buffer[: run.nbytes])
            self._in_flight.append(_InFlight(operation, run, buffer))
            return
        while self._num_direct >= _MAX_DIRECT_IN_FLIGHT:
            self.reap()
        filler = self.job.supply.filler
        crc = filler.sum_direct(run)
        operation = self._write(run, filler.direct_memory(run))
        self._in_flight.append(_InFlight(operation, run, None, crc))
        self._num_direct += 1

    def _write(self, run: Run, data: object) -> Operation:
        return self.engine.write(self.job.file, run.offset, data, lane=self.job.lane)  # type: ignore[arg-type]

    def reap(self) -> bool:
        """Waits for the oldest write; raises its error, and ChangedTensorError."""
        if not self._in_flight:
            return False
        flying = self._in_flight.popleft()
        try:
            self._finish(flying)
        finally:
            if flying.buffer is None:
                self._num_direct -= 1
            else:
                self.job.supply.take_back(flying.buffer)
        return True

    def _finish(self, flying: _InFlight) -> None:
        filler = self.job.supply.filler
        try:
            flying.operation.result()
        except OSError:
            if flying.buffer is None:
                filler.check_held(flying.run)  # the kernel met memory that had been freed
            raise
        if flying.buffer is None:
            filler.check_direct(flying.run, flying.crc)

    def reap_direct(self) -> None:
        """Waits until nothing is written from where it lies any more."""
        while self._num_direct:
            self.reap()

    def abandon(self) -> None:
        """Waits for everything in flight and forgets how it ended: an error is on its way."""
        while True:
            try:
                if not self.reap():
                    return
            except (OSError, ChangedTensorError):
                continue
