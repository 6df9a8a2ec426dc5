"""How checkpoints are summed: CRC-32C, a block at a time."""

from __future__ import annotations

from aio.checksum import copy_ranges, copy_with_crc, crc32c

__all__ = ["CRC_BLOCK_BYTES", "copy_ranges", "copy_with_crc", "crc32c"]

CRC_BLOCK_BYTES = 16 << 20
"""A chunk carries one checksum for each block of this many of its bytes."""
