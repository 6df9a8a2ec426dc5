"""Boxes that overlap are found by comparing few of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.format.bulk import overlaps
from checkpoint.format.bulk.overlaps import have_overlap

Box = list[tuple[int, int]]


def corners(boxes: list[Box]) -> tuple[overlaps.Corners, overlaps.Corners]:
    low = np.array([[first for first, _ in box] for box in boxes], np.int64)
    return low, low + np.array([[size for _, size in box] for box in boxes], np.int64)


def share_an_element(one: Box, other: Box) -> bool:
    return all(
        max(first, begin) < min(first + size, begin + length)
        for (first, size), (begin, length) in zip(one, other, strict=True)
    )


some_boxes = st.integers(1, 3).flatmap(
    lambda count: st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=count, max_size=count),
        min_size=2,
        max_size=9,
    )
)


@pytest.mark.parametrize("pairs", [1, 3, 1 << 18])
@given(boxes=some_boxes)
def test_boxes_overlap_where_two_share_an_element(pairs: int, boxes: list[Box]) -> None:
    expected = any(share_an_element(*two) for two in itertools.combinations(boxes, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlaps, "_PAIRS", pairs)
        assert have_overlap(*corners(boxes)) == expected


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1), (1, 4096), (64, 64)])
def test_slices_and_grids_need_few_comparisons(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    boxes: list[Box] = [
        [(8 * row, 8), (4 * column, 4)] for row in range(rows) for column in range(columns)
    ]
    compared: list[int] = []
    repeat = np.repeat

    def counting(values: overlaps.Corners, counts: overlaps.Corners) -> overlaps.Corners:
        compared.append(int(counts.sum()))
        return repeat(values, counts)

    monkeypatch.setattr(np, "repeat", counting)
    assert not have_overlap(*corners(boxes))
    # Each chunk of what is compared is repeated twice.
    assert sum(compared) / 2 <= len(boxes) * min(rows, columns) / 2
