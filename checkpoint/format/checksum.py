"""CRC-32C over memory in C, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoint._native import ffi, lib

CRC_BLOCK_BYTES = 16 << 20
"""A chunk carries one checksum for each block of this many of its bytes."""


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a contiguous buffer, continuing from `crc`."""
    view = ffi.from_buffer(data)
    return lib.ckpt_crc32c(crc, view, len(view))


def copy_with_crc(
    sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], crcs: Sequence[int]
) -> list[int]:
    """Copies ranges by address and gives each one's CRC, continued from `crcs`.

    A target of 0 is not written, only summed; a source of 0 writes zeros and leaves its CRC alone.
    The caller keeps all of the memory alive. Runs as one call without the interpreter lock.
    """
    sums = np.array(crcs, np.uint32)
    lib.ckpt_copy_crc32c(
        len(sizes),
        _words(sources),
        _words(targets),
        _words(sizes),
        ffi.from_buffer("uint32_t[]", sums.data, require_writable=True),
    )
    result: list[int] = sums.tolist()
    return result


def copy_ranges(sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> None:
    """`copy_with_crc` without the sums, at the full speed of a copy."""
    lib.ckpt_copy_crc32c(len(sizes), _words(sources), _words(targets), _words(sizes), ffi.NULL)


def _words(values: Sequence[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", np.array(values, np.uint64).data)
