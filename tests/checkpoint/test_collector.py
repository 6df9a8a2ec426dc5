"""The cycle collector during saves and loads: kept away, and otherwise the program's own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from checkpoint.collector import paused_collector


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def collections() -> int:
    """Of any generation: which one it is depends on how often the younger were collected before."""
    return sum(generation["collections"] for generation in gc.get_stats())


def collections_of_garbage() -> int:
    before = collections()
    kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    assert len(kept) == 5000
    return collections() - before


def test_no_collection_begins_inside_and_they_go_on_after() -> None:
    thresholds = gc.get_threshold()
    with paused_collector():
        assert collections_of_garbage() == 0
        with paused_collector():
            pass
        assert collections_of_garbage() == 0
    assert gc.get_threshold() == thresholds
    assert collections_of_garbage() > 0


def test_a_program_that_disables_the_collector_meanwhile_is_not_overruled() -> None:
    with paused_collector():
        gc.disable()
    assert not gc.isenabled()
    assert collections_of_garbage() == 0


def test_thresholds_that_a_program_sets_meanwhile_stay() -> None:
    with paused_collector():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_collector_that_thresholds_keep_away_for_good_stays_away() -> None:
    for threshold in (0, (1 << 31) - 1):
        gc.set_threshold(threshold, 4, 5)
        with paused_collector():
            assert gc.get_threshold() == (threshold, 4, 5)
        assert gc.get_threshold() == (threshold, 4, 5)


def test_thresholds_that_another_thread_borrows_inside_and_puts_back_later_go_with_the_next() -> (
    None
):
    usual = gc.get_threshold()
    with paused_collector():
        borrowed = gc.get_threshold()
    gc.set_threshold(*borrowed)
    before = collections()
    kept = [[] for _ in range(1_100_000)]  # type: ignore[var-annotated]
    assert collections() > before, len(kept)
    with paused_collector():
        pass
    assert gc.get_threshold() == usual


def test_a_child_that_is_forked_inside_collects() -> None:
    thresholds = gc.get_threshold()
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(gc.get_threshold() != thresholds)
    assert os.waitpid(child, 0)[1] == 0
