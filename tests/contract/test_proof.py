"""What runs in ``make test``, what in ``make proof`` alone, and what in ``make test-gpu``."""

import argparse
from pathlib import Path

import pytest

from tests.support.examples import examples
from tests.support.parts import kept_of, part_of
from tests.support.proof import matrix

TESTS = Path(__file__).parents[1]


def test_cells_of_a_matrix_that_are_not_usual_are_proof() -> None:
    first, second, third = matrix(["a", "b", "c"], usual={"b"})
    assert second == "b"
    assert (first.values, third.values) == (("a",), ("c",))
    assert [mark.name for mark in (*first.marks, *third.marks)] == ["proof", "proof"]
    assert matrix([(1, 2), (3, 4)], usual=[(1, 2)])[1].values == (3, 4)


def test_parts_have_every_cell_between_them_and_those_of_few_cells_each() -> None:
    cells = [*"aaaaa", "single", *"bb"]
    first, second = (kept_of(cells, which, 2) for which in (1, 2))
    assert first == [True, False, True, False, True, True, True, False]
    assert all(one or other for one, other in zip(first, second, strict=True))
    assert second[5]
    assert kept_of(cells, 1, 1) == [True] * len(cells)


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "one/two", "1/2/3"])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no part|not K/N"):
        part_of(text)


def test_properties_are_tried_on_a_few_examples_at_least() -> None:
    assert examples(4) >= 4
    assert 10 <= examples(40) < examples(400)


def test_all_that_needs_a_gpu_is_where_make_looks_for_it() -> None:
    mark = ".".join(("mark", "gpu"))
    found = {path for path in TESTS.rglob("*.py") if mark in path.read_text()}
    assert found
    assert {path.parent for path in found} == {TESTS / "gpu"}
    assert all(mark in path.read_text() for path in (TESTS / "gpu").glob("test_*.py"))
    assert "-m gpu tests/gpu" in (TESTS.parent / "Makefile").read_text()
