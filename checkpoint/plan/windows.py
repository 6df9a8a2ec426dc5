"""Strided elements cut into boxes that lie in short ranges of memory: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from checkpoint.format.slices import Shape, may_overlap_itself, span_elements


def goes_forward(shape: Shape, strides: Shape) -> bool:
    """Whether a row-major walk of the elements goes from the first to the last one in memory."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    falling = all(strides[one] >= strides[two] for one, two in pairwise(axes))
    return falling and not may_overlap_itself(shape, strides)


def windows(shape: Shape, strides: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes (start, shape) that make up all elements and reach over at most so many each, in the
    order of memory: no two ranges overlap. All in one, whatever it reaches over, where elements
    overlap.
    """
    if 0 in shape:
        return
    if may_overlap_itself(shape, strides):
        yield (0,) * len(shape), shape
        return
    axes = sorted((axis for axis, size in enumerate(shape) if size > 1), key=lambda a: -strides[a])
    yield from _windows(axes, (0,) * len(shape), shape, strides, most)


def _windows(
    axes: list[int], start: Shape, shape: Shape, strides: Shape, most: int
) -> Iterator[tuple[Shape, Shape]]:
    reach = span_elements(shape, strides)
    if reach <= most or not axes:
        yield start, shape
        return
    axis, *inner = axes
    rest = reach - (shape[axis] - 1) * strides[axis]
    step = max((most - rest) // strides[axis] + 1, 1)
    for first in range(0, shape[axis], step):
        size = min(step, shape[axis] - first)
        begin = (*start[:axis], first, *start[axis + 1 :])
        yield from _windows(inner, begin, (*shape[:axis], size, *shape[axis + 1 :]), strides, most)
