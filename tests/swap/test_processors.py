"""How many threads a kernel takes in the background."""

import threading
from collections.abc import Callable

import pytest

from swap.processors import num_threads, share_with, stay_in_background


def _in_background(work: Callable[[], int], most: int | None = None) -> int:
    found: list[int] = []

    def run() -> None:
        stay_in_background(most)
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap.processors.num_processors", lambda: 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))


def test_background_thread_takes_the_processors_of_the_process() -> None:
    assert _in_background(lambda: num_threads(None)) == 16
    assert _in_background(lambda: num_threads(None), most=3) == 3


def test_background_thread_takes_the_part_of_its_rank_while_ranks_share_the_machine() -> None:
    undo = share_with(4)
    assert _in_background(lambda: num_threads(None)) == 4
    other, same = share_with(32), share_with(4)
    assert _in_background(lambda: num_threads(None)) == 1
    other()
    undo()
    undo()
    assert _in_background(lambda: num_threads(None)) == 4
    same()
    assert _in_background(lambda: num_threads(None)) == 16


def test_affinity_that_shrinks_counts_at_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowed() -> int:
        assert num_threads(None) == 16
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
        return num_threads(None)

    assert _in_background(narrowed) == 2
