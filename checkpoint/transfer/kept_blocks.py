"""Verified checksum blocks that are kept for the next reading: the newest ones, up to some bytes.

Of a block that had to go its sums by the unit stay, 1 KiB for 16 MiB. What is wanted of it again is
read in units and verified with those: so a pass that goes through more blocks side by side than are
kept (columns that many ranks saved) reads each whole once, and once more what it takes from it.

Invariant: bytes of a block that are in memory have been verified, by its own sum or by these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from checkpoint.format.checksum import crc32c

UNIT_BYTES = 64 << 10
Block = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]
Key = tuple[int, int, int]
"""File, offset of the chunk and number of the block in it."""


class KeptBlock:
    """A block of which some units are in memory. Bytes that are not take address space alone."""

    def __init__(self, memory: Block, sums: Sums | None = None) -> None:
        """All of a block; with `sums`, those of its units, nothing of one."""
        self.memory = memory
        self.sums = sums
        self._has = bytearray([sums is None]) * -(-len(memory) // UNIT_BYTES)

    @property
    def held_bytes(self) -> int:
        """In memory."""
        return min(self._has.count(1) * UNIT_BYTES, len(self.memory))

    def unit(self, number: int) -> slice:
        """Where a unit is in the block."""
        return slice(number * UNIT_BYTES, min((number + 1) * UNIT_BYTES, len(self.memory)))

    def missing(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Runs [first, last) of units that bytes [low, high) take and that are not in memory."""
        first, last = low // UNIT_BYTES, -(-high // UNIT_BYTES)
        absent = [number for number in range(first, last) if not self._has[number]]
        begin = 0
        for place in range(1, len(absent) + 1):
            if place == len(absent) or absent[place] != absent[place - 1] + 1:
                yield absent[begin], absent[place - 1] + 1
                begin = place

    def fill(self, first: int, data: Block) -> None:
        """Takes verified units from number `first` on."""
        begin = first * UNIT_BYTES
        self.memory[begin : begin + len(data)] = data
        count = -(-len(data) // UNIT_BYTES)
        self._has[first : first + count] = bytes([True]) * count

    def unit_sums(self) -> Sums:
        """CRC-32C of each unit; all of the block is in memory unless they are known."""
        if self.sums is None:
            units = (self.memory[self.unit(number)] for number in range(len(self._has)))
            self.sums = np.array([crc32c(unit) for unit in units], np.uint32)
        return self.sums


class KeptBlocks:
    """The blocks, by key. Its caller sees to it that one thread at a time uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[Key, tuple[KeptBlock, int]] = OrderedDict()
        self._sums: dict[Key, Sums] = {}
        self.held_bytes = 0
        """Of all blocks, in memory."""

    def find(self, key: Key, nbytes: int) -> KeptBlock | None:
        """The block, of which there may be nothing in memory; None if it was never read."""
        if key in self._kept:
            return self._kept[key][0]
        if key in self._sums:
            return KeptBlock(np.empty(nbytes, np.uint8), self._sums[key])
        return None

    def keep(self, key: Key, block: KeptBlock) -> None:
        """Takes a block, or more of one, and lets others go for it."""
        if key in self._kept:
            self.held_bytes -= self._kept.pop(key)[1]
        self._kept[key] = block, block.held_bytes
        self.held_bytes += block.held_bytes
        while self.held_bytes > self._limit_bytes:
            gone, (oldest, held) = self._kept.popitem(last=False)
            self.held_bytes -= held
            self._sums[gone] = oldest.unit_sums()

    def clear(self) -> None:
        """Lets go of the blocks."""
        self._kept.clear()
        self.held_bytes = 0
