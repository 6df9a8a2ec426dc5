"""Reads data files: large pieces straight to where they belong, small ones through staging memory,
every checksum block, or every grain of one that is wanted in part, verified on the way.

Up to 32 files are read at a time. A thread for each submits reads ahead and takes their results in
order, so that the copy and the sum of one buffer run while the next ones are read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aio import Engine, File, Operation, Request
from checkpoint._native import ffi
from checkpoint.directory.headers import check_header, wait_for_reads
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES, copy_with_crc, copy_with_unit_crcs
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.records import ChunkRecord, FileRecord, Sums
from checkpoint.plan.read_runs import (
    ReadPiece,
    ReadRun,
    Span,
    Wanted,
    independent,
    plan_reads,
    unit_of,
)
from checkpoint.plan.write_runs import MAX_SLOTS, Slots, plan_slots
from checkpoint.sheltered import Cancellation, StoppedError
from checkpoint.tensors.copiers import NO_DEVICES, Buffer, Copier
from checkpoint.tensors.targets import Place
from checkpoint.threads import run_all
from checkpoint.transfer.memory import staging_slab
from checkpoint.transfer.uploads import Piece, Uploads

MIN_DIRECT_BYTES = 1 << 20
_MAX_DIRECT_IN_FLIGHT = 4
MAX_OPEN_FILES = 32
"""Read at a time: each takes a thread and two descriptors."""


class ChunkRead(NamedTuple):
    """Bytes [first, last) of a chunk of the tensor of this name."""

    tensor: str
    chunk: ChunkRecord
    first: int
    last: int

    @property
    def unit(self) -> int:
        """Bytes that are verified at a time."""
        return unit_of(self.chunk, self.first, self.last)


Places = Callable[[], Sequence[Place | None]]
"""Gives, for each read of a file, where its chunk goes; None if it is only to be verified. Called
when the first of them is needed, and may wait until they are known."""


@dataclass(frozen=True, slots=True)
class FileReads:
    """What is wanted of one data file, in its order, and the lane that reads it.

    `early`: the places are not known yet; until they are, all staging memory is read into.
    """

    path: Path
    record: FileRecord
    lane: int
    reads: Sequence[ChunkRead]
    places: Places
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a load reads: its engine (None: one of its own), its memory, whether it verifies, what
    brings bytes to devices, what may ask it to stop, and what is told before the first read.
    """

    engine: Engine | None
    staging_bytes: int
    verify: bool
    copier: Copier = NO_DEVICES
    cancellation: Cancellation = field(default_factory=Cancellation)
    begins: Callable[[], object] = bool


class Reader:
    """Reads from a set of data files; one use.

    With `problems` damage is added to that list instead of ending the read.
    """

    def __init__(
        self,
        engine: Engine,
        files: Sequence[FileReads],
        options: ReadOptions,
        problems: list[CorruptCheckpointError] | None = None,
    ) -> None:
        self._engine = engine
        self._files = files
        self._workers = min(len(files), MAX_OPEN_FILES)
        self._share = options.staging_bytes // max(self._workers, 1)
        self._verify = options.verify
        self._copier = options.copier
        self._problems = problems
        self._stop = threading.Event()
        self._cancellation = options.cancellation

    def run(self) -> None:
        """Reads and delivers everything.

        Raises the first error: CorruptCheckpointError naming file, tensor and extent, AioError, or
        what a sink raised; nothing is in flight any more then. Targets may be partly written.
        """
        left = deque(self._files)
        tasks = [partial(self._work, left)] * self._workers
        run_all(tasks, self.stop, "checkpoint-read")

    def stop(self) -> None:
        """Makes `run` give up soon. From any thread."""
        self._stop.set()

    def _work(self, left: deque[FileReads]) -> None:
        """Reads one file after the other, until none is left."""
        while True:
            try:
                reads = left.popleft()
            except IndexError:
                return
            self._check_stopped()
            self._read(reads)

    def _check_stopped(self) -> None:
        self._cancellation.check()
        if self._stop.is_set():
            raise StoppedError

    def _read(self, reads: FileReads) -> None:
        try:
            with self._engine.open(reads.path) as file:
                stream = _ReadStream(self._engine, file, reads, self._verify, self._problems)
                stream.check_header()
                count = None if reads.early else MAX_SLOTS
                self._stream(stream, plan_slots(stream.staged_bytes(), self._share, count))
        except BaseException:
            self._stop.set()
            raise

    def _stream(self, stream: _ReadStream, slots: Slots) -> None:
        with staging_slab(slots.count * slots.nbytes) as slab:
            stream.free = [slab.allocate(slots.nbytes) for _ in range(slots.count)]
            stream.uploads = Uploads(self._copier, tuple(stream.free))
            try:
                for run in stream.runs(slots.nbytes):
                    self._check_stopped()
                    stream.submit(run)
                stream.drain()
            except BaseException:
                stream.abandon()
                raise


@dataclass(slots=True)
class _InFlight:
    run: ReadRun
    operations: list[Operation]
    buffer: Buffer | None


@dataclass(slots=True)
class _ReadStream:
    """The reading of one file: its free buffers, what is in flight, the sum of the open unit."""

    engine: Engine
    file: File
    wanted: FileReads
    verify: bool
    problems: list[CorruptCheckpointError] | None
    free: list[Buffer] = field(default_factory=list)
    uploads: Uploads = field(default_factory=partial(Uploads, NO_DEVICES, ()))
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _known_places: Sequence[Place | None] | None = None
    _crc: dict[int, int] = field(default_factory=dict)

    def check_header(self) -> None:
        try:
            check_header(self.engine, self.file, self.wanted.record, lane=self.wanted.lane)
        except CorruptCheckpointError as error:
            self._damaged(error)

    def staged_bytes(self) -> int:
        """Upper bound of what passes through staging memory."""
        total = ALIGNMENT
        for read in self.wanted.reads:
            widened = min(read.last - read.first + 2 * read.unit, read.chunk.nbytes)
            total += widened + 2 * ALIGNMENT
        return min(total, self.wanted.record.nbytes)

    def runs(self, run_bytes: int) -> Iterator[ReadRun]:
        # As runs are taken, not before: of the small chunks no place needs to be known yet.
        wanted = (
            Wanted(
                read.chunk.offset,
                read.chunk.nbytes,
                read.first,
                read.last,
                self._is_direct(number, read),
                read.unit,
            )
            for number, read in enumerate(self.wanted.reads)
        )
        return plan_reads(wanted, run_bytes, verify=self.verify)

    def _is_direct(self, number: int, read: ChunkRead) -> bool:
        """Whether the device can put the bytes where they belong."""
        if read.last - read.first < MIN_DIRECT_BYTES or not self.file.direct:
            return False
        place = self._place(number)
        if place is None or place.address is None:
            return False
        return (place.address + read.first) % self.file.memory_alignment == 0

    def _place(self, number: int) -> Place | None:
        """Where the chunk of a read goes."""
        if self._known_places is None:
            self._known_places = self.wanted.places()
        return self._known_places[number]

    def submit(self, run: ReadRun) -> None:
        buffer = None
        if run.direct:
            while len(self._in_flight) >= _MAX_DIRECT_IN_FLIGHT + len(self.free):
                self._reap()
            address = self._address(run.pieces[0])
            assert address
            target: Any = ffi.buffer(ffi.cast("char *", address), run.nbytes)
        else:
            while not self.free or self._is_far_ahead():
                self._reap_one()
            buffer = self.free.pop()
            target = buffer[: run.nbytes]
        requests = [
            Request("read", self.file, span.offset, _part(target, span)) for span in run.spans
        ]
        operations = self.engine.submit(requests, lane=self.wanted.lane)
        self._in_flight.append(_InFlight(run, operations, buffer))

    def _is_far_ahead(self) -> bool:
        """More in flight than keeps a disk busy only takes more memory, and that out of caches."""
        return self._known_places is not None and len(self._in_flight) >= MAX_SLOTS

    def _address(self, piece: ReadPiece) -> int | None:
        """Where in host memory a piece belongs; 0 if nowhere, None if a function takes it."""
        place = self._place(piece.chunk)
        if place is None or not piece.kept:
            return 0
        return None if place.address is None else place.address + piece.first

    def _reap_one(self) -> None:
        """Gets a buffer nearer to being free."""
        if self._in_flight:
            self._reap()
        else:
            self.free.append(self.uploads.end())

    def _reap(self) -> None:
        """Takes the oldest read, delivers and verifies what it brought."""
        flying = self._in_flight.popleft()
        try:
            wait_for_reads(flying.operations, partial(self._tensor_at, flying.run))
            if flying.buffer is not None:
                self._deliver(flying.run, flying.buffer)
            elif self.verify:
                address = self._address(flying.run.pieces[0])
                assert address
                self._sum(flying.run, [address], [0])
        except BaseException:
            if flying.buffer is not None:
                self.free.append(flying.buffer)
            raise

    def _tensor_at(self, run: ReadRun, offset: int) -> str:
        """The one that a run has at an offset of the file, or next behind it."""
        reads = [self.wanted.reads[piece.chunk] for piece in run.pieces]
        for piece, read in zip(run.pieces, reads, strict=True):
            if offset < read.chunk.offset + piece.first + piece.nbytes:
                return read.tensor
        return reads[-1].tensor

    def _deliver(self, run: ReadRun, buffer: Buffer) -> None:
        """Verifies what a buffer holds and brings it where it belongs; the buffer is free then."""
        base = buffer.ctypes.data
        targets = [self._address(piece) for piece in run.pieces]
        self._sum(run, [base + piece.place for piece in run.pieces], [at or 0 for at in targets])
        uploaded = []
        for piece, target in zip(run.pieces, targets, strict=True):
            place = self._place(piece.chunk)
            if target is None and place is not None and place.deliver is not None:
                data = buffer[piece.place : piece.place + piece.nbytes].data
                if self.uploads.takes(place.deliver):
                    uploaded.append(Piece(place.deliver, piece.first, data))
                else:
                    place.deliver(piece.first, data)
        self.free += self.uploads.begin(uploaded, buffer) if uploaded else [buffer]

    def _sum(self, run: ReadRun, origins: list[int], targets: list[int]) -> None:
        """Copies the pieces and advances the sums of their units; a unit that ends is checked."""
        sizes = [piece.nbytes for piece in run.pieces]
        if not self.verify:
            copy_with_crc(origins, targets, sizes, [0] * len(sizes))
            return
        units = [self.wanted.reads[piece.chunk].unit for piece in run.pieces]
        for low, high in independent(run.pieces, units):
            own, own_units = run.pieces[low:high], units[low:high]
            inside = [piece.first % unit for piece, unit in zip(own, own_units, strict=True)]
            before = [
                self._crc.pop(piece.chunk, 0) if begun else 0
                for piece, begun in zip(own, inside, strict=True)
            ]
            places = origins[low:high], targets[low:high], sizes[low:high]
            if min(own_units) == CRC_BLOCK_BYTES:  # a piece has something of one, and not of two
                crcs = copy_with_crc(*places, before)
                for piece, crc in zip(own, crcs, strict=True):
                    self._check_block(piece, crc)
                continue
            after = copy_with_unit_crcs(*places, inside, own_units, before)
            for piece, unit, sums in zip(own, own_units, after, strict=True):
                self._check(piece, unit, sums)

    def _check_block(self, piece: ReadPiece, crc: int) -> None:
        """`_check` of a piece of one block, in a way that counts where there are many."""
        chunk = self.wanted.reads[piece.chunk].chunk
        number, end = piece.first // CRC_BLOCK_BYTES, piece.first + piece.nbytes
        if end % CRC_BLOCK_BYTES and end < chunk.nbytes:
            self._crc[piece.chunk] = crc
        elif crc != chunk.crc32c[number]:
            self._check(piece, CRC_BLOCK_BYTES, np.array([crc], np.uint32))

    def _check(self, piece: ReadPiece, unit: int, sums: Sums) -> None:
        """Compares the sums of the units that a piece touches, but of one that goes on."""
        read = self.wanted.reads[piece.chunk]
        begin, end = piece.first // unit, piece.first + piece.nbytes
        if end % unit and end < read.chunk.nbytes:
            self._crc[piece.chunk] = int(sums[-1])
            sums = sums[:-1]
        expected = read.chunk.unit_sums(unit, begin, begin + len(sums))
        if np.array_equal(sums, expected):
            return
        for index in np.flatnonzero(sums != expected).tolist():
            self._damaged(
                read.chunk.wrong_unit_sum(
                    unit,
                    begin + index,
                    int(sums[index]),
                    path=self.wanted.path,
                    tensor=read.tensor,
                )
            )

    def _damaged(self, problem: CorruptCheckpointError) -> None:
        if self.problems is not None:
            self.problems.append(problem)
            return
        try:
            raise problem
        finally:
            del problem  # its traceback leads to this frame, and would keep the buffers

    def drain(self) -> None:
        while self._in_flight:
            self._reap()
        self.uploads.end_all()

    def abandon(self) -> None:
        """Waits for what is in flight and forgets what it brings: an error is on its way."""
        while self._in_flight:
            for operation in self._in_flight.popleft().operations:
                operation.abandon()
        self.uploads.abandon()


def _part(target: Any, span: Span) -> Any:
    return target if span.nbytes == len(target) else target[span.place : span.place + span.nbytes]
