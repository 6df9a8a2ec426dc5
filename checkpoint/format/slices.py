"""Boxes in tensors: pure arithmetic between flat element ranges and per-dimension ranges.

A box is (start, shape), both one integer per dimension. Row-major order throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Row-major strides in elements; a dimension of 0 or 1 counts as 1, as in torch."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a row-major walk meets consecutive elements; strides of dimensions of 1 are free."""
    if 0 in shape:
        return True
    expected = contiguous_strides(shape)
    return all(
        size == 1 or have == want for size, have, want in zip(shape, strides, expected, strict=True)
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one gapless range, each once, in whatever order of dimensions."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def may_overlap_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place: surely not if each stride, from the smallest on,
    leads beyond all that the smaller ones reach.
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one touched, both included; 0 if there is none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def split_dimension(shape: Sequence[int]) -> int | None:
    """Dimension along which a row-major box can be cut into contiguous parts; None if it cannot."""
    return next((axis for axis, size in enumerate(shape) if size > 1), None)


def range_boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[tuple[slice, ...], Shape]]:
    """Cuts elements [first, last) of a row-major tensor into few boxes, in order.

    Yields (slices, shape of the slice). At most two boxes per dimension and one more.
    """
    yield from _range_boxes((), shape, first, last)


def _range_boxes(
    fixed: tuple[slice, ...], shape: Shape, first: int, last: int
) -> Iterator[tuple[tuple[slice, ...], Shape]]:
    if first >= last:
        return
    ones = (1,) * len(fixed)
    if not shape:
        yield fixed, ones
        return
    row = math.prod(shape[1:])
    low, into_low = divmod(first, row)
    high, into_high = divmod(last, row)
    if low == high:
        yield from _range_boxes((*fixed, slice(low, low + 1)), shape[1:], into_low, into_high)
        return
    if into_low:
        yield from _range_boxes((*fixed, slice(low, low + 1)), shape[1:], into_low, row)
        low += 1
    if low < high:
        rest = tuple(slice(0, size) for size in shape[1:])
        yield (*fixed, slice(low, high), *rest), (*ones, high - low, *shape[1:])
    yield from _range_boxes((*fixed, slice(high, high + 1)), shape[1:], 0, into_high)


def flat_first(whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> int | None:
    """Where a box begins in its row-major tensor, if it is one gapless range there, else None."""
    if 0 in shape:
        return 0
    partial = False
    for size, limit in zip(reversed(shape), reversed(whole), strict=True):
        if partial and size != 1:
            return None
        partial = partial or size != limit
    return sum(low * step for low, step in zip(start, contiguous_strides(whole), strict=True))


def elements_before(whole: Shape, start: Shape, shape: Shape, first: int) -> int:
    """How many elements of a box come before element `first` of the row-major tensor that it is a
    box of. In both of them these are the first ones: the order of elements is the same.
    """
    if not shape:  # one element, to which no index leads
        return min(first, 1)
    count, left = 0, first
    for step, low, size, inner in zip(
        contiguous_strides(whole), start, shape, _inner_sizes(shape), strict=True
    ):
        index, left = divmod(left, step)
        if index < low:
            return count
        if index >= low + size:
            return count + size * inner
        count += (index - low) * inner
    return count


def _inner_sizes(shape: Shape) -> Shape:
    """Elements of a row-major box for each step along a dimension."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def gapless_ranges(whole: Shape, shape: Shape) -> tuple[int, int]:
    """How many dimensions of a box lead to its gapless ranges, and elements of each of these."""
    axis, count = len(shape), 1
    while axis:
        axis -= 1
        count *= shape[axis]
        if shape[axis] != whole[axis]:
            break
    while axis and shape[axis - 1] == 1:
        axis -= 1
    return axis, count


def box_ranges(whole: Shape, start: Shape, shape: Shape, gap: int) -> list[tuple[int, int]]:
    """Elements [first, last) of a row-major tensor that have a box of it, and nothing between its
    rows where these lie more than `gap` elements apart.
    """
    if 0 in shape:
        return []
    axis, count = gapless_ranges(whole, shape)
    strides = contiguous_strides(whole)
    while axis and strides[axis - 1] - count <= gap:
        axis -= 1
        count += (shape[axis] - 1) * strides[axis]
    firsts = offsets_of(shape[:axis], strides)
    begin = offset_of(start, strides)
    return [(begin + first, begin + first + count) for first in firsts]


def offsets_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where the elements are that all indices of leading dimensions lead to, in their order."""
    offsets = [0]
    for size, stride in zip(shape, strides, strict=False):
        offsets = [low + index * stride for low in offsets for index in range(size)]
    return offsets


def merged(ranges: Sequence[tuple[int, int]], unit: int) -> list[tuple[int, int]]:
    """Ranges, in the order of their beginnings, that have all bytes of some, and no unit of two.

    Those that touch when they have been widened to units are one, too.
    """
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if first >= last:
            continue
        if found and first // unit * unit <= -(-found[-1][1] // unit) * unit:
            first, last = found[-1][0], max(last, found.pop()[1])
        found.append((first, last))
    return found


def shared_box(
    one: Shape, one_shape: Shape, other: Shape, other_shape: Shape
) -> tuple[Shape, Shape] | None:
    """The (start, shape) of what two boxes, given by start and shape, have in common, if any."""
    lows = tuple(map(max, one, other))
    boxes = zip(one, one_shape, other, other_shape, lows, strict=True)
    shape = tuple(min(a + n, b + m) - low for a, n, b, m, low in boxes)
    return (lows, shape) if all(size > 0 for size in shape) else None


def in_bytes(whole: Shape, start: Shape, shape: Shape, itemsize: int) -> tuple[Shape, Shape, Shape]:
    """The bytes of a box as a box of bytes, in as few dimensions as it has: one that it takes whole
    goes into the one before it. (Columns [2, 3) of 8 of 4 bytes: bytes [8, 12) of 32 in each row.)
    """
    wholes, starts, shapes = [1], [0], [1]
    for limit, low, size in zip((*whole, itemsize), (*start, 0), (*shape, itemsize), strict=True):
        if size == limit:
            wholes[-1], starts[-1], shapes[-1] = (
                wholes[-1] * limit,
                starts[-1] * limit,
                shapes[-1] * limit,
            )
        else:
            wholes.append(limit)
            starts.append(low)
            shapes.append(size)
    return tuple(wholes), tuple(starts), tuple(shapes)


def offset_of(start: Sequence[int], strides: Sequence[int]) -> int:
    """Where an element is in memory of these strides."""
    return sum(low * stride for low, stride in zip(start, strides, strict=True))


def place_in(origin: Shape, box: tuple[Shape, Shape]) -> Slices:
    """A box (start, shape) as a place in another one, which begins at `origin`."""
    return tuple(
        slice(low - other, low - other + size)
        for low, size, other in zip(*box, origin, strict=True)
    )
