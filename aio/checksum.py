"""CRC-32C over memory in C, without the interpreter lock.

google-crc32c is as fast, but lets go of that lock only for `bytes` objects, which staging memory
never is, and cannot copy while it sums.
"""

from collections.abc import Sequence
from itertools import accumulate
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


def copy_with_unit_crcs(
    sources: Sequence[int],
    targets: Sequence[int],
    sizes: Sequence[int],
    inside: Sequence[int],
    units: Sequence[int],
    before: Sequence[int],
) -> list[npt.NDArray[np.uint32]]:
    """As `copy_with_crc`, of ranges that are summed in units of so many bytes each.

    A range begins `inside` of a unit, whose CRC continues from `before`. Gives, for each range, the
    CRCs of the units that it touches, the last over what it has of it.
    """
    counts = [
        -(-(nbytes + first) // unit) if nbytes else 0
        for nbytes, first, unit in zip(sizes, inside, units, strict=True)
    ]
    ends = list(accumulate(counts))
    crcs = np.empty(ends[-1] if ends else 0, np.uint32)
    lib.aio_copy_crc32c_units(
        len(counts),
        _words([*sources, *targets, *sizes, *inside, *units, *before]),
        ffi.from_buffer("uint32_t[]", crcs.data, require_writable=True),
    )
    return [crcs[end - count : end] for end, count in zip(ends, counts, strict=True)]


def join_crcs(crcs: npt.NDArray[np.uint32], unit_bytes: int, last_bytes: int) -> int:
    """The CRC-32C of units in a row from theirs: each of so many bytes, the last of `last_bytes`.

    There is one at the least.
    """
    given = np.ascontiguousarray(crcs, np.uint32)
    return lib.aio_crc32c_join(
        ffi.from_buffer("uint32_t[]", given.data), len(given), unit_bytes, last_bytes
    )


def copy_ranges(sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> None:
    """`copy_with_crc` without the sums, at the full speed of a copy."""
    lib.aio_copy_crc32c(len(sizes), _words(sources), _words(targets), _words(sizes), ffi.NULL)


def _words(values: Sequence[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", np.array(values, np.uint64).data)
