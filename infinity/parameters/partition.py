"""Which elements of which parameter a rank keeps: pure arithmetic, no I/O.

A large parameter is cut, as a flat row of elements, into one *slice* for each rank; a small one is
kept whole by every rank (replicated).

Invariants:
- the slices of a parameter cover it exactly once, in the order of the ranks;
- every slice starts at a multiple of ``PIECE`` elements, so that sums over blocks of that many are
  the same blocks whatever the number of ranks;
- slices of one parameter differ by one *unit* at most (a piece, or the fewest whole rows that are
  whole pieces where there are plenty of these), and which ranks have the longer ones goes by what
  each has already, so the ranks' totals stay level.

Follows ZeRO-Infinity (arXiv 2104.07857, section 6.1), bandwidth-centric partitioning.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swap.plan.layout import PIECE

_PLENTY = 16
"""Units for each rank from which on whole rows are worth being cut at."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter of ``numel`` elements is shared: rank ``r`` keeps elements ``[offsets[r],
    offsets[r + 1])``. No offsets: every rank keeps all of it.
    """

    numel: int
    offsets: tuple[int, ...] = ()

    @property
    def is_replicated(self) -> bool:
        return not self.offsets

    def start(self, rank: int) -> int:
        """The first element that ``rank`` keeps."""
        return self.offsets[rank] if self.offsets else 0

    def length(self, rank: int) -> int:
        """How many elements ``rank`` keeps."""
        return self.offsets[rank + 1] - self.offsets[rank] if self.offsets else self.numel

    @property
    def is_level(self) -> bool:
        """Whether it is cut into slices of one length."""
        ranks = len(self.offsets) - 1
        return ranks > 0 and self.length(0) * ranks == self.numel

    @property
    def lengths(self) -> list[int]:
        """Those of all ranks, of a parameter that is cut."""
        return [high - low for low, high in itertools.pairwise(self.offsets)]


@dataclass(frozen=True, slots=True)
class Share:
    """What the partition needs to know of a parameter. ``bytes_per_element`` weighs its elements
    against those of others; ``row`` is how many of them lie together in its last dimensions.
    """

    numel: int
    bytes_per_element: int
    row: int
    always_on_host: bool


def partition(shares: Sequence[Share], world_size: int) -> list[Cut]:
    """The cut of every parameter, the same on every rank that asks for the same shares."""
    held = [0] * world_size
    cuts = []
    for share in shares:
        cut = _cut(share, held)
        if not cut.is_replicated and not cut.is_level:
            for rank, length in enumerate(cut.lengths):
                held[rank] += length * share.bytes_per_element
        cuts.append(cut)
    return cuts


def _cut(share: Share, held: Sequence[int]) -> Cut:
    world_size = len(held)
    if share.always_on_host or world_size == 1 or share.numel < world_size * PIECE:
        return Cut(share.numel)
    unit = _unit(share, world_size)
    units, rest = divmod(share.numel, unit)
    # The last unit may be a part of one: it goes where the others end, and counts as one.
    units += rest > 0
    least, longer = divmod(units, world_size)
    if not longer:
        return _level(share.numel, unit * least, world_size)
    emptiest = sorted(range(world_size), key=lambda rank: (held[rank], rank))[:longer]
    offsets = [0]
    for rank in range(world_size):
        stop = offsets[-1] + unit * (least + (rank in emptiest))
        offsets.append(min(stop, share.numel))
    return Cut(share.numel, tuple(offsets))


@functools.lru_cache(maxsize=64)
def _level(numel: int, length: int, world_size: int) -> Cut:
    """Every rank gets ``length``, but for the end of the last one. Large models have few shapes."""
    return Cut(numel, tuple(min(rank * length, numel) for rank in range(world_size + 1)))


def _unit(share: Share, world_size: int) -> int:
    """Elements at whose multiples a parameter is cut."""
    whole_rows = math.lcm(PIECE, max(1, share.row))
    return whole_rows if share.numel >= _PLENTY * world_size * whole_rows else PIECE


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, length) ranges in order, those that meet as one; empty ones are left out."""
    result: list[tuple[int, int]] = []
    for first, length in sorted(ranges):
        if not length:
            continue
        if result and result[-1][0] + result[-1][1] == first:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((first, length))
    return result
