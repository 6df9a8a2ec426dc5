"""CRC-32C over memory in C, without the interpreter lock.

google-crc32c is as fast, but lets go of that lock only for `bytes` objects, which staging memory
never is, and cannot copy while it sums.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aio._native import ffi, lib


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a contiguous buffer, continuing from `crc`."""
    view = ffi.from_buffer("uint8_t[]", data)
    return lib.aio_crc32c(crc, view, len(view))


def block_crcs(data: Any, block_bytes: int) -> npt.NDArray[np.uint32]:
    """The CRC-32C of each block of so many bytes of a contiguous buffer; the last may be shorter.

    Runs as one call.
    """
    view = ffi.from_buffer("uint8_t[]", data)
    crcs = np.empty(-(-len(view) // block_bytes), np.uint32)
    out = ffi.from_buffer("uint32_t[]", crcs.data, require_writable=True)
    lib.aio_crc32c_blocks(view, len(view), block_bytes, out)
    return crcs


def copy_with_crc(
    sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], crcs: Sequence[int]
) -> list[int]:
    """Copies ranges by address and gives each one's CRC, continued from `crcs`.

    A target of 0 is not written, only summed; a source of 0 writes zeros and leaves its CRC alone.
    The caller keeps all of the memory alive. Runs as one call.
    """
    sums = np.array(crcs, np.uint32)
    lib.aio_copy_crc32c(
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
    lib.aio_copy_crc32c(len(sizes), _words(sources), _words(targets), _words(sizes), ffi.NULL)


def _words(values: Sequence[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", np.array(values, np.uint64).data)
