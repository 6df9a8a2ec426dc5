"""The files that extents are in."""

from __future__ import annotations

from dataclasses import dataclass, field

from aio import AioError, File, RangeAllocator
from aio.descriptors import Descriptor
from swap.storage.directory import SwapDirectory

ALIGNMENT = 4096


@dataclass(slots=True)
class Volume:
    """One directory's file, its free ranges, and how much load it was given for its share."""

    name: str
    file: File
    lane: int
    """Which directory's lanes it uses."""
    share: float = 0.0
    ranges: RangeAllocator = field(default_factory=lambda: RangeAllocator(0, alignment=ALIGNMENT))
    directory: SwapDirectory | None = None
    holes: Descriptor | None = None
    """Of an adopted file: by what its ranges are given back."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.ranges.nbytes

    @property
    def used_bytes(self) -> int:
        return self.ranges.used_bytes


def taken_at_end(volume: Volume, nbytes: int) -> int:
    """How much of ``nbytes`` the file has been made longer by. Nothing tells how much it may be
    (quotas, limits, reserved blocks), so ever smaller parts are asked for.
    """
    taken, part = 0, nbytes
    while taken < nbytes and part:
        part = min(part, nbytes - taken)
        try:
            volume.file.allocate(volume.nbytes + taken, part)
            taken += part
        except AioError:
            part = part // 2 // ALIGNMENT * ALIGNMENT
    return taken
