"""Fills staging buffers with the bytes of one data file and sums them, in one pass or in two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from checkpoint._native import ffi
from checkpoint.errors import ChangedTensorError
from checkpoint.format.checksum import (
    CRC_BLOCK_BYTES,
    copy_ranges,
    copy_with_unit_crcs,
    crc32c,
    join_crcs,
)
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.plan.state_plan import FilePlan
from checkpoint.plan.write_runs import (
    DEVICE_SLOT_BYTES,
    DEVICE_SLOTS,
    MAX_SLOT_BYTES,
    MAX_SLOTS,
    ZEROS,
    Extent,
    Piece,
    Run,
    Slots,
    plan_runs,
    plan_slots,
)
from checkpoint.tensors.copiers import NO_DEVICES, Buffer, Copier, Transfers, is_copied
from checkpoint.tensors.sources import Source, TensorReader
from checkpoint.threads import asked

MIN_DIRECT_BYTES = 1 << 20
"""Below this, gathering a tensor with its neighbours beats a write of its own."""


class Filler:
    """The bytes of one data file, run by run.

    Runs have to be summed in their order; they may be copied in any, several at once. What lies on
    a device is brought by `copier`, which has begun.
    """

    def __init__(
        self, plan: FilePlan, sources: Sequence[Source], copier: Copier = NO_DEVICES
    ) -> None:
        self.plan = plan
        self.copier = copier
        grains = plan.grains or (0,) * len(plan.shards)
        # By extent number. Of the header, which comes first, and of gaps nobody asks the sums.
        self._units = [CRC_BLOCK_BYTES, *(size or CRC_BLOCK_BYTES for size in grains)]
        counts = [
            -(-shard.nbytes // unit)
            for shard, unit in zip(plan.shards, self._units[1:], strict=True)
        ]
        self._places = [0, *accumulate(counts, initial=0)]
        """In `_sums`, by extent number: where those of its units begin."""
        self._sums = np.zeros(self._places[-1], np.uint32)
        self._summed_bytes = 0
        self._sources = sources
        # As in `_origins`, the header comes first.
        self._held = [None, *(source.held for source in sources)]
        header = plan.layout.header
        # The header is extent 0, shard k is extent k + 1.
        self._origins: list[int | None] = [int(ffi.cast("uintptr_t", ffi.from_buffer(header)))]
        for shard, source in zip(plan.shards, sources, strict=True):
            address = source.address
            self._origins.append(None if address is None else address + shard.first_byte)

    @property
    def has_to_read(self) -> bool:
        """Whether there is a source that is not in memory as its bytes."""
        return any(origin is None for origin in self._origins)

    @property
    def has_to_copy(self) -> bool:
        """Whether there is a source on a device."""
        return self.copier is not NO_DEVICES and any(
            is_copied(source, self.copier) for source in self._sources
        )

    def slots(
        self, budget_bytes: int, count: int | None = MAX_SLOTS, nbytes: int = MAX_SLOT_BYTES
    ) -> Slots:
        """Buffers for this file, see `plan_slots`."""
        if self.has_to_copy:
            count, nbytes = None if count is None else DEVICE_SLOTS, DEVICE_SLOT_BYTES
        return plan_slots(self.plan.layout.nbytes, budget_bytes, count, nbytes)

    def sums(self) -> list[tuple[tuple[int, ...], int, bytes]]:
        """For every shard in order, when all runs were summed: the CRC-32C of each 16 MiB block,
        the bytes of a grain, and the CRC-32C of each grain, as a chunk has them.
        """
        nbytes = sum(shard.nbytes for shard in self.plan.shards)
        assert self._summed_bytes == nbytes, "a shard was not written whole"
        return [self._sums_of(number) for number in range(1, len(self._units))]

    def _sums_of(self, number: int) -> tuple[tuple[int, ...], int, bytes]:
        unit = self._units[number]
        sums = self._sums[self._places[number] : self._places[number + 1]]
        if unit == CRC_BLOCK_BYTES:
            return tuple(sums.tolist()), 0, b""
        nbytes = self.plan.shards[number - 1].nbytes
        blocks = range(0, nbytes, CRC_BLOCK_BYTES)
        joined = tuple(
            self._joined(number, first, min(CRC_BLOCK_BYTES, nbytes - first)) for first in blocks
        )
        return joined, unit, sums.astype(">u4").tobytes()

    def _joined(self, number: int, first: int, nbytes: int) -> int:
        """The sum of bytes from the beginning of a unit on, that have been summed."""
        unit = self._units[number]
        begin = self._places[number] + first // unit
        sums = self._sums[begin : begin - (-nbytes // unit)]
        return join_crcs(sums, unit, (nbytes - 1) % unit + 1)

    def runs(self, run_bytes: int, memory_alignment: int) -> Iterator[Run]:
        """The writes that make up the file.

        `memory_alignment` is what the device needs to take memory from where it lies; with 0
        everything is copied.
        """
        layout = self.plan.layout
        extents = [Extent(0, len(layout.header))]
        for shard, offset, origin in zip(
            self.plan.shards, layout.offsets, self._origins[1:], strict=True
        ):
            large = shard.nbytes >= MIN_DIRECT_BYTES and offset % ALIGNMENT == 0
            direct = large and bool(memory_alignment and origin and origin % memory_alignment == 0)
            extents.append(Extent(offset, shard.nbytes, direct))
        return plan_runs(extents, layout.nbytes, run_bytes)

    def direct_memory(self, run: Run) -> Any:
        """The memory that a direct run writes, as a buffer; the sources keep it alive."""
        number, first, _, nbytes = run.pieces[0]
        origin = self._origins[number]
        assert origin is not None
        return ffi.buffer(ffi.cast("char *", origin + first), nbytes)

    def sum_direct(self, run: Run) -> int:
        """Sums a direct run, before it is written; gives the sum of the run alone.

        Raises ChangedTensorError if its memory is no longer there.
        """
        self.check_held(run)
        number, first, _, nbytes = run.pieces[0]
        origin = self._origins[number]
        assert origin is not None
        assert first % CRC_BLOCK_BYTES == 0, "a direct run begins with its checksum block"
        self._sum(run, [origin + first], [0], [nbytes])
        return self._joined(number, first, nbytes)

    def check_direct(self, run: Run, before: int) -> None:
        """Sums a direct run again when it has been written, unless its memory tells of any change.

        Whoever changes memory while the device reads it changes it between the two sums. Raises
        ChangedTensorError if that happened.
        """
        self.check_held(run)
        number = run.pieces[0][0]
        held = self._held[number]
        if held is not None and held.tells_all:
            return
        if crc32c(self.direct_memory(run)) != before:
            raise self._changed(number)

    def check_held(self, run: Run) -> None:
        """Raises ChangedTensorError naming a tensor of a run whose memory is no longer there."""
        for number, _, _, _ in run.pieces:
            if number > 0:
                self._check_held(number)

    def _check_held(self, number: int) -> None:
        held = self._held[number]
        if held is not None and not held.is_there():
            raise self._changed(number)

    def _changed(self, number: int) -> ChangedTensorError:
        name, held = self.plan.names[number - 1], self._held[number]
        return ChangedTensorError(name) if held is None else held.changed(name)

    def fill(self, run: Run, buffer: Buffer) -> None:
        """Copies a run into a buffer and sums it on the way.

        Raises ChangedTensorError if memory of it was freed, and what a source raises.
        """
        origins, targets, sizes = self._gather(run, buffer)
        self.check_held(run)
        self._sum(run, origins, targets, sizes)
        self.check_held(run)

    def copy(self, run: Run, buffer: Buffer) -> None:
        """Copies a run into a buffer, to be summed there later. Raises as `fill` does."""
        origins, targets, sizes = self._gather(run, buffer)
        self.check_held(run)
        copy_ranges(origins, targets, sizes)
        self.check_held(run)

    def sum(self, run: Run, buffer: Buffer) -> None:
        """Sums a run that lies in a buffer."""
        base = buffer.ctypes.data
        pieces = [piece for piece in run.pieces if piece[0] > 0]
        origins = [base + place for _, _, place, _ in pieces]
        sizes = [nbytes for _, _, _, nbytes in pieces]
        self._sum(Run(run.offset, run.nbytes, False, pieces), origins, [0] * len(sizes), sizes)

    def _gather(self, run: Run, buffer: Buffer) -> tuple[list[int], list[int], list[int]]:
        """Where from and where to; sources that have no address are read here and now."""
        base = buffer.ctypes.data
        origins, targets, sizes = [], [], []
        to_read = []
        for piece in run.pieces:
            number, first, place, nbytes = piece
            target = base + place
            origin = 0 if number == ZEROS else self._origins[number]
            if origin is None:
                to_read.append(piece)
                origins.append(target)
                target = 0
            else:
                origins.append(origin + first if origin else 0)
            targets.append(target)
            sizes.append(nbytes)
        if to_read:
            self._read_all(to_read, buffer)
        return origins, targets, sizes

    def _read_all(self, pieces: Sequence[Piece], buffer: Buffer) -> None:
        """Reads pieces into their places. What devices copy they copy meanwhile."""
        copied = [piece for piece in pieces if is_copied(self._source(piece), self.copier)]
        transfers = self.copier.transfers() if copied else None
        try:
            for piece in pieces:
                number, first, place, nbytes = piece
                out = buffer[place : place + nbytes]
                if transfers is not None and is_copied(self._source(piece), self.copier):
                    self._copy(number, first, out, transfers)
                else:
                    self._read(number, first, out)
        finally:
            if transfers is not None:
                transfers.wait()

    def _source(self, piece: Piece) -> Source:
        return self._sources[piece[0] - 1]

    def _copy(self, number: int, first: int, out: Buffer, transfers: Transfers) -> None:
        """Begins to copy from a device."""
        source, shard = self._sources[number - 1], self.plan.shards[number - 1]
        assert isinstance(source.read, TensorReader)
        self._check_held(number)
        for target, values in source.read.boxes(shard.first_byte + first, out.data):
            transfers.copy(target, values)

    def _read(self, number: int, first: int, out: Buffer) -> None:
        source, shard = self._sources[number - 1], self.plan.shards[number - 1]
        assert source.read is not None
        ragged = first % source.element.itemsize or len(out) % source.element.itemsize
        assert not ragged, "runs are cut between elements"
        self._check_held(number)
        asked.by_save = True
        try:
            source.read(shard.first_byte + first, out.data)
        finally:
            asked.by_save = False
        self._check_held(number)

    def _sum(self, run: Run, origins: list[int], targets: list[int], sizes: list[int]) -> None:
        """Copies and sums the pieces of a run; a piece that continues a unit continues its sum."""
        units = [self._units[max(number, 0)] for number, _, _, _ in run.pieces]
        inside = [
            first % unit if number > 0 else 0
            for (number, first, _, _), unit in zip(run.pieces, units, strict=True)
        ]
        before = [
            int(self._sums[self._places[number] + first // unit]) if begun else 0
            for (number, first, _, _), unit, begun in zip(run.pieces, units, inside, strict=True)
        ]
        after = copy_with_unit_crcs(origins, targets, sizes, inside, units, before)
        for (number, first, _, nbytes), unit, sums in zip(run.pieces, units, after, strict=True):
            if number > 0:
                place = self._places[number] + first // unit
                self._sums[place : place + len(sums)] = sums
                self._summed_bytes += nbytes
