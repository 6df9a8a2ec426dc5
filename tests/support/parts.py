"""Runs a part of what takes long: ``--part 1/2`` is every other cell of each matrix, ``--part 2/2``
the others. What has fewer cells than there are parts is in each of them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", type=part_of, help="of cells marked proof, the K-th of every N"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: tuple[int, int] | None = config.getoption("--part")
    if part is None:
        return
    names = [_function_of(item) for item in items if item.get_closest_marker("proof")]
    kept = iter(kept_of(names, *part))
    left = [item for item in items if item.get_closest_marker("proof") and not next(kept)]
    config.hook.pytest_deselected(items=left)
    others = {*left}
    items[:] = [item for item in items if item not in others]


def part_of(text: str) -> tuple[int, int]:
    """``K/N`` as two numbers."""
    try:
        which, num_parts = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, such as 1/2") from None
    if not 1 <= which <= num_parts:
        raise argparse.ArgumentTypeError(f"there is no part {which} of {num_parts}")
    return which, num_parts


def kept_of(functions: Iterable[str], which: int, num_parts: int) -> list[bool]:
    """Of cells in order, by the function that each is of, which ones are in that part."""
    names = list(functions)
    totals, seen = Counter(names), Counter[str]()
    kept = []
    for name in names:
        is_in_part = seen[name] % num_parts == which - 1
        kept.append(is_in_part or totals[name] < num_parts)
        seen[name] += 1
    return kept


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
