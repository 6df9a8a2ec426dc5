"""What runs in ``make test``, and what in ``make proof`` alone."""

from tests.support.examples import examples
from tests.support.proof import matrix


def test_cells_of_a_matrix_that_are_not_usual_are_proof() -> None:
    first, second, third = matrix(["a", "b", "c"], usual={"b"})
    assert second == "b"
    assert (first.values, third.values) == (("a",), ("c",))
    assert [mark.name for mark in (*first.marks, *third.marks)] == ["proof", "proof"]
    assert matrix([(1, 2), (3, 4)], usual=[(1, 2)])[1].values == (3, 4)


def test_properties_are_tried_on_a_few_examples_at_least() -> None:
    assert examples(4) >= 4
    assert 10 <= examples(40) < examples(400)
