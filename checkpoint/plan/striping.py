"""Which stripe holds which rows of which tensor: pure arithmetic over bytes.

A large tensor is cut into one contiguous row range per stripe, in proportion to what each stripe
still lacks, so that rounding to rows evens out over tensors; a small one stays whole.

Invariants: the shards of a tensor tile it, at most one in each stripe; a stripe's shards come in
the order of the tensors; the load of a stripe misses its share by little more than one MiB, one row
or one small tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from checkpoint.format.slices import Shape, split_dimension

MIN_SHARD_BYTES = 4 << 20
"""A tensor is not cut into parts smaller than this: each is a request and an entry of its own."""

_QUANTA = 4


def quantum_rows(row_bytes: int, min_shard_bytes: int = MIN_SHARD_BYTES) -> int:
    """Tensors are cut at multiples of this many rows, so that a regular grid fits the cuts."""
    return max(1, min_shard_bytes // _QUANTA // row_bytes)


class Part(NamedTuple):
    """What one rank holds of a tensor: the row-major box at `start` of `shape`."""

    itemsize: int
    start: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Shard(NamedTuple):
    """A contiguous range of a part that goes into one file.

    `start` and `shape` are its box in the whole tensor; `first_byte` counts in the part.
    """

    tensor: int
    start: Shape
    shape: Shape
    first_byte: int
    nbytes: int


def plan_stripes(
    parts: Sequence[Part], weights: Sequence[float], min_shard_bytes: int = MIN_SHARD_BYTES
) -> list[list[Shard]]:
    """Gives each stripe its shards; `weights` are the stripes' shares of all bytes, any scale."""
    bytes_of = {part: part.nbytes for part in set(parts)}  # there are few different ones
    sizes = [bytes_of[part] for part in parts]
    if len(weights) == 1:
        return [
            [
                Shard(index, part.start, part.shape, 0, nbytes)
                for index, (part, nbytes) in enumerate(zip(parts, sizes, strict=True))
            ]
        ]
    scale = sum(sizes) / sum(weights)
    lacks = [weight * scale for weight in weights]
    stripes: list[list[Shard]] = [[] for _ in weights]
    # The large first: the small ones then fill what rounding to rows left.
    for index in sorted(range(len(parts)), key=sizes.__getitem__, reverse=True):
        part, nbytes = parts[index], sizes[index]
        if nbytes < 2 * min_shard_bytes:
            emptiest = lacks.index(max(lacks))
            stripes[emptiest].append(Shard(index, part.start, part.shape, 0, nbytes))
            lacks[emptiest] -= nbytes
            continue
        for stripe, shard in _cut(index, part, lacks, min_shard_bytes):
            stripes[stripe].append(shard)
            lacks[stripe] -= shard.nbytes
    for shards in stripes:
        shards.sort(key=itemgetter(0))
    return stripes


def _whole(index: int, part: Part) -> Shard:
    return Shard(index, part.start, part.shape, 0, part.nbytes)


def _cut(
    index: int, part: Part, lacks: list[float], min_shard_bytes: int
) -> list[tuple[int, Shard]]:
    nbytes = part.nbytes
    axis = split_dimension(part.shape)
    pieces = min(len(lacks), nbytes // min_shard_bytes)
    if pieces < 2 or axis is None:
        emptiest = max(range(len(lacks)), key=lacks.__getitem__)
        return [(emptiest, _whole(index, part))]
    neediest = sorted(range(len(lacks)), key=lacks.__getitem__, reverse=True)[:pieces]
    chosen = sorted(neediest)
    row_bytes = nbytes // part.shape[axis]
    shares = [max(lacks[stripe], 1.0) for stripe in chosen]
    rows = _proportional(part.shape[axis], shares, quantum_rows(row_bytes, min_shard_bytes))
    return _row_shards(index, part, axis, list(zip(chosen, rows, strict=True)))


def _proportional(rows: int, shares: list[float], quantum: int) -> list[int]:
    """Splits rows by shares; the cut points are rounded, so that the counts add up."""
    total, before, cuts = sum(shares), 0.0, [0]
    for share in shares:
        before += share
        cuts.append(min(rows, round(rows * before / total / quantum) * quantum))
    cuts[-1] = rows
    return [high - low for low, high in itertools.pairwise(cuts)]


def _row_shards(
    index: int, part: Part, axis: int, rows: list[tuple[int, int]]
) -> list[tuple[int, Shard]]:
    row_bytes = math.prod(part.shape[axis + 1 :]) * part.itemsize
    shards, first = [], 0
    for stripe, count in rows:
        if count == 0:
            continue
        start = (*part.start[:axis], part.start[axis] + first, *part.start[axis + 1 :])
        shape = (*part.shape[:axis], count, *part.shape[axis + 1 :])
        shards.append((stripe, Shard(index, start, shape, first * row_bytes, count * row_bytes)))
        first += count
    return shards
