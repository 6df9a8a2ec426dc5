"""Which rank writes which elements of which tensor: pure arithmetic, the same on every rank.

Invariants: every element of every tensor is written once; a rank writes only what it holds; what
all ranks hold (replicated) is shared out so that all ranks write the same number of bytes, as far
as what each holds alone allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from checkpoint.format import elements
from checkpoint.format.records import MAX_CHUNKS
from checkpoint.format.slices import range_boxes
from checkpoint.plan.striping import Part, plan_stripes

Ranges = tuple[tuple[int, int], ...]


class OwnedRanges(NamedTuple):
    """What a rank has of a tensor: elements (first, length) of its row-major order, or all. A range
    of length 0 is of none, wherever it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: Ranges | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return elements.BY_NAME[self.dtype].itemsize

    @property
    def held(self) -> list[tuple[int, int]]:
        """The ranges that hold something, if it has not all."""
        return [(first, length) for first, length in self.ranges or () if length]


class Piece(NamedTuple):
    """Elements [first, first + length) of tensor number `tensor` of rank 0."""

    tensor: int
    first: int
    length: int


def share_out(ranks: Sequence[Sequence[OwnedRanges]]) -> list[list[Piece]]:
    """The pieces that each rank writes. The tensors are those of rank 0.

    Raises ValueError naming a tensor that another rank has and rank 0 has not, that is not the same
    on all, or of which the ranks together do not hold every element once.
    """
    tensors = ranks[0]
    by_name = [{holding.name: holding for holding in own} for own in ranks]
    _check_known(by_name)
    pieces: list[list[Piece]] = [[] for _ in ranks]
    replicated = []
    for number, tensor in enumerate(tensors):
        holders = {r: own[tensor.name] for r, own in enumerate(by_name) if tensor.name in own}
        _check_alike(tensor, holders)
        if any(holding.ranges is not None for holding in holders.values()):
            _check_complete(tensor, holders)
            for rank, holding in holders.items():
                pieces[rank].extend(Piece(number, *held) for held in holding.held)
            if not tensor.numel:
                pieces[min(holders)].append(Piece(number, 0, 0))
        elif len(holders) < len(ranks):
            pieces[min(holders)].append(Piece(number, 0, tensor.numel))
        else:
            replicated.append(number)
    for rank, piece in _spread(tensors, replicated, pieces):
        pieces[rank].append(piece)
    return [sorted(own) for own in pieces]


def _spread(
    tensors: Sequence[OwnedRanges], replicated: Sequence[int], pieces: Sequence[Sequence[Piece]]
) -> Iterator[tuple[int, Piece]]:
    """Gives what every rank has to those that have less to write."""
    loads = [sum(piece.length * tensors[piece.tensor].itemsize for piece in own) for own in pieces]
    parts = [
        Part(tensors[number].itemsize, (0,) * len(tensors[number].shape), tensors[number].shape)
        for number in replicated
    ]
    total = sum(loads) + sum(part.nbytes for part in parts)
    lacks = [max(total / len(loads) - load, 1e-9) for load in loads]
    for rank, shards in enumerate(plan_stripes(parts, lacks)):
        for shard in shards:
            itemsize = parts[shard.tensor].itemsize
            first, length = shard.first_byte // itemsize, shard.nbytes // itemsize
            yield rank, Piece(replicated[shard.tensor], first, length)


def _check_known(by_name: Sequence[Mapping[str, OwnedRanges]]) -> None:
    for rank, own in enumerate(by_name):
        for name in own:
            if name not in by_name[0]:
                raise ValueError(
                    f"rank {rank} saves {name!r}, which is not in the state of rank 0; every rank "
                    "has to save the same tree"
                )


def _check_alike(tensor: OwnedRanges, holders: Mapping[int, OwnedRanges]) -> None:
    for rank, holding in holders.items():
        if holding.dtype != tensor.dtype or holding.shape != tensor.shape:
            raise ValueError(
                f"{tensor.name!r} is {tensor.dtype} of shape {list(tensor.shape)} on rank 0, "
                f"{holding.dtype} of shape {list(holding.shape)} on rank {rank}"
            )


def _check_complete(tensor: OwnedRanges, holders: Mapping[int, OwnedRanges]) -> None:
    for rank, holding in holders.items():
        if holding.ranges is None:
            raise ValueError(f"rank {rank} has all of {tensor.name!r}, other ranks a part of it")
    ranges = [held for holding in holders.values() for held in holding.held]
    chunks = _num_chunks(tensor.shape, ranges)
    if chunks > MAX_CHUNKS:
        raise ValueError(
            f"{tensor.name!r} would be stored in {chunks} chunks, more than the {MAX_CHUNKS} that "
            "readers accept; give each rank fewer and longer ranges"
        )
    reached = 0
    follows = ""
    for first, length in sorted(ranges):
        if length < 0 or first != reached:
            follows = f", and then comes the range {(first, length)}"
            break
        reached = first + length
    if follows or reached != tensor.numel:
        raise ValueError(
            f"the ranks do not hold every element of {tensor.name!r} once: of {tensor.numel}, the "
            f"first {reached} are in order{follows}"
        )


def _num_chunks(shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> int:
    """How many boxes ranges of a tensor are, before stripes cut them; counted where it matters."""
    if len(ranges) * (2 * len(shape) + 1) <= MAX_CHUNKS:
        return len(ranges)
    return sum(
        sum(1 for _ in range_boxes(shape, first, first + length)) for first, length in ranges
    )
