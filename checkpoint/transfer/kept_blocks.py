"""Verified checksum blocks that are kept for the next reading: the newest ones, up to some bytes.

A block is read in units, as they are wanted, if it has sums of them: those of its grains, which a
manifest may have. One without is read whole. When such a one has to go, its sums by the unit stay,
1 KiB for 16 MiB, and what is wanted of it again is read in units and verified with those: so a pass
that goes through more blocks side by side than are kept (columns that many ranks saved) reads each
whole once, and once more what it takes from it.

Invariant: bytes of a block that are in memory have been verified, by its own sum or by these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkpoint.format.checksum import block_crcs
from checkpoint.format.slices import merged
from checkpoint.transfer.memory import plain_slab

UNIT_BYTES = 64 << 10
_HUGE_BYTES = 2 << 20
Block = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]
Key = tuple[int, int, int]
"""File, offset of the chunk and number of the block in it."""


class KeptBlock:
    """A block of which some units are in memory. Bytes that are not take address space alone."""

    def __init__(self, memory: Block, sums: Sums | None = None, unit_bytes: int = 0) -> None:
        """All of a block; with `sums`, those of its units, nothing of one."""
        self.memory = memory
        self.sums = sums
        self.unit_bytes = unit_bytes or UNIT_BYTES
        self._has = bytearray([sums is None]) * -(-len(memory) // self.unit_bytes)

    @property
    def held_bytes(self) -> int:
        """In memory."""
        return min(self._has.count(1) * self.unit_bytes, len(self.memory))

    def unit(self, number: int) -> slice:
        """Where a unit is in the block."""
        return slice(
            number * self.unit_bytes, min((number + 1) * self.unit_bytes, len(self.memory))
        )

    def missing(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Runs [first, last) of units that have what is not in memory of ranges of bytes, in their
        order.
        """
        absent: list[tuple[int, int]] = []
        for low, high in ranges:
            number, last = low // self.unit_bytes, -(-high // self.unit_bytes)
            while (number := self._has.find(0, number, last)) >= 0:
                end = self._has.find(1, number, last)
                end = last if end < 0 else end
                absent.append((number * self.unit_bytes, end * self.unit_bytes))
                number = end
        return [
            (first // self.unit_bytes, last // self.unit_bytes)
            for first, last in merged(absent, self.unit_bytes)
        ]

    def fill(self, first: int, data: Block) -> None:
        """Takes verified units from number `first` on."""
        begin = first * self.unit_bytes
        self.memory[begin : begin + len(data)] = data
        count = -(-len(data) // self.unit_bytes)
        self._has[first : first + count] = bytes([True]) * count

    def unit_sums(self) -> Sums:
        """CRC-32C of each unit; all of the block is in memory unless they are known."""
        if self.sums is None:
            self.sums = block_crcs(self.memory, self.unit_bytes)
        return self.sums


def sparse_memory(nbytes: int) -> Block:
    """Of a block of which units are read: a huge page would be taken whole for one of them."""
    if nbytes <= _HUGE_BYTES:
        return np.empty(nbytes, np.uint8)
    with plain_slab(nbytes) as slab:
        return slab.allocate(nbytes)


class KeptBlocks:
    """The blocks, by key. Its caller sees to it that one thread at a time uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[Key, tuple[KeptBlock, int]] = OrderedDict()
        self._sums: dict[Key, tuple[Sums, int]] = {}
        self.held_bytes = 0
        """Of all blocks, in memory."""

    def find(self, key: Key, nbytes: int) -> KeptBlock | None:
        """The block, of which there may be nothing in memory; None if it was never read."""
        if key in self._kept:
            return self._kept[key][0]
        if key in self._sums:
            return KeptBlock(sparse_memory(nbytes), *self._sums[key])
        return None

    def keep(self, key: Key, block: KeptBlock) -> None:
        """Takes a block, or more of one, and lets others go for it."""
        if key in self._kept:
            self.held_bytes -= self._kept.pop(key)[1]
        self._kept[key] = block, block.held_bytes
        self.held_bytes += block.held_bytes
        while self.held_bytes > self.limit_bytes:
            gone, (oldest, held) = self._kept.popitem(last=False)
            self.held_bytes -= held
            self._sums[gone] = oldest.unit_sums(), oldest.unit_bytes

    def clear(self) -> None:
        """Lets go of the blocks."""
        self._kept.clear()
        self.held_bytes = 0
