"""Fills staging buffers with the bytes of one data file and sums them, in one pass or in two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoint._native import ffi
from checkpoint.errors import ChangedTensorError
from checkpoint.format.checksum import CRC_BLOCK_BYTES, copy_ranges, copy_with_crc, crc32c
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.plan.state_plan import FilePlan
from checkpoint.plan.write_runs import ZEROS, Extent, Run, plan_runs
from checkpoint.tensors.sources import Source

MIN_DIRECT_BYTES = 1 << 20
"""Below this, gathering a tensor with its neighbours beats a write of its own."""

Buffer = npt.NDArray[np.uint8]


class Filler:
    """The bytes of one data file, run by run.

    `sums` are, for every shard in order, one CRC-32C per 16 MiB block. Runs have to be summed in
    their order; they may be copied in any, several at once.
    """

    def __init__(self, plan: FilePlan, sources: Sequence[Source]) -> None:
        self.plan = plan
        self.sums: list[list[int]] = [[] for _ in plan.shards]
        self._sources = sources
        # As in `_origins`, the header comes first.
        self._held = [None, *(source.held for source in sources)]
        header = plan.layout.header
        # The header is extent 0, shard k is extent k + 1.
        self._origins: list[int | None] = [int(ffi.cast("uintptr_t", ffi.from_buffer(header)))]
        for shard, source in zip(plan.shards, sources, strict=True):
            address = source.address
            self._origins.append(None if address is None else address + shard.first_byte)

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
        return self.sums[number - 1][-1]

    def check_direct(self, run: Run, before: int) -> None:
        """Sums a direct run again when it has been written.

        Whoever changes memory while the device reads it changes it between the two sums. Raises
        ChangedTensorError if that happened.
        """
        self.check_held(run)
        if crc32c(self.direct_memory(run)) != before:
            raise ChangedTensorError(self.plan.names[run.pieces[0][0] - 1])

    def check_held(self, run: Run) -> None:
        """Raises ChangedTensorError naming a tensor of a run whose memory is no longer there."""
        for number, _, _, _ in run.pieces:
            if number > 0:
                self._check_held(number)

    def _check_held(self, number: int) -> None:
        held = self._held[number]
        if held is not None and not held.is_there():
            raise ChangedTensorError(self.plan.names[number - 1])

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
        return origins, targets, sizes

    def _read(self, number: int, first: int, out: Buffer) -> None:
        source, shard = self._sources[number - 1], self.plan.shards[number - 1]
        assert source.read is not None
        ragged = first % source.element.itemsize or len(out) % source.element.itemsize
        assert not ragged, "runs are cut between elements"
        self._check_held(number)
        source.read(shard.first_byte + first, out.data)
        self._check_held(number)

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
