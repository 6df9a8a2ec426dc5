"""Matrices of which ``make test`` runs a few cells, and ``make proof`` the others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def matrix(cells: Iterable[Any], usual: Container[Any]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: ``cells``, all but ``usual`` marked ``proof``.

    A cell of several values is a tuple.
    """
    return [cell if cell in usual else _marked(cell) for cell in cells]


def by_turns(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """The product as parameters; usual is each of ``first`` once, those of ``second`` in turn."""
    rows = list(first)
    usual = [(value, second[number % len(second)]) for number, value in enumerate(rows)]
    return matrix(product(rows, second), usual=usual)


def _marked(cell: Any) -> Any:
    values = cell if isinstance(cell, tuple) else (cell,)
    return pytest.param(*values, marks=pytest.mark.proof)
