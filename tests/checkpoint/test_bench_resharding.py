"""What ranks read of a checkpoint whose tensors they cut in another way than it was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_resharding import Case, cases, measured, offloaded

from tests.support.memory import folder_in_memory
from tests.support.proof import matrix

tmp_path = folder_in_memory()

MOST = {
    # Both ends of rows of 43,690 bytes lie in pages that other ranks have something of.
    "columns of rows of 128 KiB": (1.07, 1.13),
    # And of rows of 5461 bytes.
    "columns of rows of 16 KiB, 1 to 3": (1.51, 1.51),
    # A chunk of 1 KiB has a page of the file.
    "1000 tensors of 4 KiB": (6.01, 6.01),
}
"""Bytes read over bytes asked for, of all ranks and of one, by beginnings of names."""
CASES = cases(3)


@pytest.mark.parametrize(
    "case",
    matrix(CASES, usual=[case for case in CASES if not case.name.startswith("1000")][::2]),
    ids=lambda case: case.name,
)
def test_no_more_is_read_than_what_is_asked_for_and_the_rest_of_its_pages(
    tmp_path: Path, case: Case
) -> None:
    ratio, worst = next(
        (most for name, most in MOST.items() if case.name.startswith(name)), (1.02, 1.02)
    )
    _, row = measured(case, tmp_path, rounds=1)
    assert 1 <= row["ratio"] <= ratio
    assert row["worst"] <= worst


@pytest.mark.proof
def test_three_ranks_read_of_what_four_saved_of_a_model_what_they_hold(tmp_path: Path) -> None:
    _, row = offloaded(tmp_path, rounds=1)
    assert row["worst"] <= 1.1
