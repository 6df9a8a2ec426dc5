"""How checkpoints are summed: CRC-32C, a block at a time, and a grain at a time what may be cut."""

from __future__ import annotations

from aio.checksum import (
    block_crcs,
    copy_ranges,
    copy_with_crc,
    copy_with_unit_crcs,
    crc32c,
    join_crcs,
)

__all__ = [
    "CRC_BLOCK_BYTES",
    "GRAIN_SIZES",
    "block_crcs",
    "copy_ranges",
    "copy_with_crc",
    "copy_with_unit_crcs",
    "crc32c",
    "grain_bytes",
    "join_crcs",
]

CRC_BLOCK_BYTES = 16 << 20
"""A chunk carries one checksum for each block of this many of its bytes."""

GRAIN_SIZES = tuple(4096 << power for power in range(12))
"""What a grain may have: up to half a block."""

_UNGRAINED_STATE_BYTES = 32 << 20
"""So little is read as a whole in no time, and its manifest stays short."""

_MOST_OF_TENSOR = 1 << 14
_MOST_OF_STATE = 1 << 22
"""Grains, of 8 bytes of the manifest each: a sixteenth of what a manifest may have."""


def grain_bytes(tensor_nbytes: int, state_nbytes: int, least: int = GRAIN_SIZES[0]) -> int:
    """In grains of how many bytes, and of `least`, parts of a tensor can be read, in a state of so
    many; 0 if only in blocks: of a small state, and of one so large that the largest grains would
    be too many.

    So fine that 512 ranks read little more of a tensor than their slices of it: two grains beside
    each slice are a sixteenth of it.
    """
    if state_nbytes <= _UNGRAINED_STATE_BYTES:
        return 0
    needed = min(tensor_nbytes / _MOST_OF_TENSOR, GRAIN_SIZES[-1])
    needed = max(needed, state_nbytes / _MOST_OF_STATE, least)
    return next((size for size in GRAIN_SIZES if size >= needed), 0)
