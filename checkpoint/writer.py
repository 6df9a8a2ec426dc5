"""Writes data files: gathers small pieces in staging memory, sums them on the way, keeps the lanes
busy.

One thread per file fills buffers and submits them; the engine writes the ones before meanwhile. A
buffer is filled again when its write has completed, so that staging memory is all the memory that a
save takes. Follows FastPersist's double buffering, with the copy and the checksum in one pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aio import Engine, File, Operation, Slab
from checkpoint._native import ffi
from checkpoint.checksum import CRC_BLOCK_BYTES, copy_with_crc
from checkpoint.datafile import ALIGNMENT
from checkpoint.planning import FilePlan
from checkpoint.sources import Source
from checkpoint.staging import ZEROS, Extent, Run, Slots, plan_runs, plan_slots

MIN_DIRECT_BYTES = 1 << 20
"""Below this, gathering a tensor with its neighbours beats a write of its own."""

_MAX_DIRECT_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class FileJob:
    """One open data file, what goes into it, and the lane that writes it."""

    plan: FilePlan
    sources: tuple[Source, ...]
    file: File
    lane: int


FileSums = list[list[int]]
"""For every shard of a file, in order, one CRC-32C per 16 MiB block."""


class Writer:
    """Writes a set of data files; one use.

    `on_staged` is called once, from any thread, when no source will be read again.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[FileJob],
        staging_bytes: int,
        on_staged: Callable[[], None] | None = None,
    ) -> None:
        share = staging_bytes // max(len(jobs), 1)
        self._slots = [plan_slots(job.plan.layout.nbytes, share) for job in jobs]
        self._engine = engine
        self._jobs = jobs
        self._on_staged = on_staged
        self._unstaged = len(jobs)
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self) -> list[FileSums]:
        """Writes everything and checks every completion.

        Raises the first error of a source or of the engine, when nothing is in flight any more.
        """
        with Slab(max(sum(slots.count * slots.nbytes for slots in self._slots), 1)) as slab:
            if len(self._jobs) == 1:
                return [self._write(self._jobs[0], self._slots[0], slab)]
            return self._run_in_threads(slab)

    def _run_in_threads(self, slab: Slab) -> list[FileSums]:
        with ThreadPoolExecutor(len(self._jobs), thread_name_prefix="checkpoint-write") as pool:
            futures = [
                pool.submit(self._write, job, slots, slab)
                for job, slots in zip(self._jobs, self._slots, strict=True)
            ]
            try:
                wait(futures)
            except BaseException:
                self._stop.set()
                raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _StoppedError):
                raise error
        return [future.result() for future in futures]

    def _write(self, job: FileJob, slots: Slots, slab: Slab) -> FileSums:
        stream = _FileStream(self._engine, job, slots, slab)
        try:
            for run in stream.runs():
                if self._stop.is_set():
                    raise _StoppedError
                stream.submit(run)
            self._staged()
            stream.drain()
        except BaseException:
            self._stop.set()
            stream.abandon()
            raise
        return stream.sums

    def _staged(self) -> None:
        with self._lock:
            self._unstaged -= 1
            is_last = self._unstaged == 0
        if is_last and self._on_staged is not None:
            self._on_staged()


class _StoppedError(Exception):
    """A thread gave up because another one failed."""


@dataclass(slots=True)
class _InFlight:
    operation: Operation
    buffer: np.ndarray[Any, Any] | None


@dataclass(slots=True)
class _FileStream:
    """The writing of one file: its free buffers, what is in flight, the checksums so far."""

    engine: Engine
    job: FileJob
    slots: Slots
    slab: Slab
    sums: FileSums = field(init=False)
    _origins: list[int | None] = field(init=False)
    _free: list[np.ndarray[Any, Any]] = field(init=False)
    _in_flight: deque[_InFlight] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = [[] for _ in self.job.plan.shards]
        header = self.job.plan.layout.header
        self._origins = [int(ffi.cast("uintptr_t", ffi.from_buffer(header)))]
        for shard, source in zip(self.job.plan.shards, self.job.sources, strict=True):
            address = source.address
            self._origins.append(None if address is None else address + shard.first_byte)
        self._free = [self.slab.allocate(self.slots.nbytes) for _ in range(self.slots.count)]
        self._in_flight = deque()

    def runs(self) -> Iterator[Run]:
        """The header is extent 0, shard k is extent k + 1."""
        layout = self.job.plan.layout
        alignment = self.job.file.memory_alignment if self.job.file.direct else 0
        extents = [Extent(0, len(layout.header))]
        for shard, offset, origin in zip(
            self.job.plan.shards, layout.offsets, self._origins[1:], strict=True
        ):
            large = shard.nbytes >= MIN_DIRECT_BYTES and offset % ALIGNMENT == 0
            # The device takes it from where it lies.
            direct = large and bool(alignment and origin and origin % alignment == 0)
            extents.append(Extent(offset, shard.nbytes, direct))
        return plan_runs(extents, layout.nbytes, self.slots.nbytes)

    def submit(self, run: Run) -> None:
        if run.direct:
            self._submit_direct(run)
        else:
            self._submit_staged(run)

    def _submit_direct(self, run: Run) -> None:
        number, first, _, nbytes = run.pieces[0]
        while len(self._in_flight) >= _MAX_DIRECT_IN_FLIGHT + self.slots.count:
            self._reap()
        origin = self._origins[number]
        assert origin is not None
        data = ffi.buffer(ffi.cast("char *", origin + first), nbytes)
        self._write(run.offset, data, None)
        self._sum(run, [origin + first], [0], [nbytes])

    def _submit_staged(self, run: Run) -> None:
        while not self._free:
            self._reap()
        buffer = self._free.pop()
        try:
            self._fill(run, buffer)
        except BaseException:
            self._free.append(buffer)
            raise
        self._write(run.offset, buffer[: run.nbytes], buffer)

    def _write(self, offset: int, data: Any, buffer: np.ndarray[Any, Any] | None) -> None:
        operation = self.engine.write(self.job.file, offset, data, lane=self.job.lane)
        self._in_flight.append(_InFlight(operation, buffer))

    def _fill(self, run: Run, buffer: np.ndarray[Any, Any]) -> None:
        base = buffer.ctypes.data
        origins, targets, sizes = [], [], []
        for number, first, place, nbytes in run.pieces:
            target = base + place
            origin = 0 if number == ZEROS else self._origins[number]
            if origin is None:
                self._read(number, first, buffer[place : place + nbytes])
                origins.append(target)
                target = 0
            else:
                origins.append(origin + first if origin else 0)
            targets.append(target)
            sizes.append(nbytes)
        self._sum(run, origins, targets, sizes)

    def _read(self, number: int, first: int, out: np.ndarray[Any, Any]) -> None:
        source, shard = self.job.sources[number - 1], self.job.plan.shards[number - 1]
        assert source.read is not None
        source.read(shard.first_byte + first, out.data)

    def _sum(self, run: Run, origins: list[int], targets: list[int], sizes: list[int]) -> None:
        """Copies and sums the pieces of a run; a piece that continues a block continues its sum."""
        before = [
            self.sums[number - 1][-1] if number > 0 and first % CRC_BLOCK_BYTES else 0
            for number, first, _, _ in run.pieces
        ]
        after = copy_with_crc(origins, targets, sizes, before)
        for (number, first, _, _), crc in zip(run.pieces, after, strict=True):
            if number <= 0:
                continue
            if first % CRC_BLOCK_BYTES:
                self.sums[number - 1][-1] = crc
            else:
                self.sums[number - 1].append(crc)

    def _reap(self) -> None:
        """Waits for the oldest write and takes its buffer back."""
        flying = self._in_flight.popleft()
        if flying.buffer is not None:
            self._free.append(flying.buffer)
        flying.operation.result()

    def drain(self) -> None:
        """Waits for everything in flight; raises the first error."""
        while self._in_flight:
            self._reap()

    def abandon(self) -> None:
        """Waits for everything in flight and forgets how it ended: an error is on its way."""
        while self._in_flight:
            try:
                self._reap()
            except OSError:
                continue
