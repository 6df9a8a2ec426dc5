"""Whether boxes overlap, of many at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Corners = npt.NDArray[np.int64]
"""A row for each box, a column for each dimension."""

_PAIRS = 1 << 18
"""Compared at a time, which bounds memory."""


def have_overlap(low: Corners, high: Corners) -> bool:
    """Whether two of the boxes [low, high) have an element in common.

    Two that do begin one within the other along every dimension. So only those are compared that do
    along one: the one along which fewest lie side by side. Slices that ranks have of a tensor need
    no comparison at all, and a grid of boxes about as many as it has boxes in a row of each.
    """
    axis = min(range(low.shape[1]), key=lambda one: _num_begun(low[:, one], high[:, one]))
    order = np.argsort(low[:, axis], kind="stable")
    low, high = low[order], high[order]
    # Of those behind each one, in this order, so many begin before it ends.
    counts = np.searchsorted(low[:, axis], high[:, axis]) - np.arange(1, len(low) + 1)
    reached = np.cumsum(np.maximum(counts, 0))
    first = 0
    while first < len(low):
        done = int(reached[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(reached, done + _PAIRS, "right")))
        own = np.maximum(counts[first:last], 0)
        one = np.repeat(np.arange(first, last), own)
        other = one + 1 + np.arange(len(one)) - np.repeat(np.cumsum(own) - own, own)
        meets = (low[one] < high[other]) & (low[other] < high[one])
        if bool(meets.all(axis=1).any()):
            return True
        first = last
    return False


def _num_begun(low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> int:
    """How many begin before the end of each, along one dimension, of all together."""
    return int(np.searchsorted(np.sort(low), high).sum())
