"""Steps behind training give the bits of plain tensors in whatever order threads go on."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aio.process.threads import Latch, Thread, join_thread, start_thread
from tests.support.interleaved_steps import Counts, run_seed
from tests.support.turns import DeadlockError, Turns

_USUAL = 8
_PARTS, _SEEDS = 6, 350


def _run(seeds: range, folder: Path) -> Counts:
    total = Counts()
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        try:
            total += run_seed(seed, place)
        except BaseException as error:
            error.add_note(f"seed {seed}: tests.support.interleaved_steps.run_seed({seed}, folder)")
            raise
        place.rmdir()
    return total


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("seeds")


def test_steps_whose_threads_take_turns_have_the_same_bits(folder: Path) -> None:
    total = _run(range(_USUAL), folder)
    assert min(total.switches, total.steps, total.saves, total.snapshots, total.failed) > 0


@pytest.mark.proof
@pytest.mark.parametrize("part", range(_PARTS))
def test_steps_in_very_many_orders_have_the_same_bits(
    part: int, folder: Path, counted: Callable[..., None]
) -> None:
    first = 1000 + part * _SEEDS
    total = _run(range(first, first + _SEEDS), folder)
    assert total.restored > 0
    counted("interleavings", seeds=_SEEDS, **total.as_numbers())


def _orders(seed: int) -> list[int]:
    """What two threads do in the order in which they take turns."""
    done: list[int] = []
    turns = Turns(seed, (__file__,))

    def work(number: int) -> None:
        for _ in range(5):
            done.append(number)

    with turns.applied():
        threads = [Thread(lambda number=number: work(number), f"t{number}") for number in (1, 2)]
        for thread in threads:
            start_thread(thread)
        for thread in threads:
            join_thread(thread)
    return done


def test_order_of_threads_is_that_of_the_seed_and_others_of_others() -> None:
    orders = [_orders(seed) for seed in range(8)]
    assert orders == [_orders(seed) for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 2


def _wait_for_one_another() -> None:
    one, other = threading.Lock(), threading.Lock()
    has_begun = Latch()

    def work() -> None:
        with other:
            has_begun.set()
            with one:
                pass

    with one:
        start_thread(Thread(work, "second"))
        has_begun.wait()
        with other:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_wait_for_one_another_are_told() -> None:
    turns = Turns(0, (__file__,))
    with turns.applied(), pytest.raises(DeadlockError, match="no thread can go on"):
        _wait_for_one_another()


def test_waiting_with_a_timeout_takes_no_time_where_nobody_else_goes_on() -> None:
    turns = Turns(0, (__file__,))
    with turns.applied():
        items: queue.SimpleQueue[int] = queue.SimpleQueue()
        assert not Latch().wait(3600.0)
        with pytest.raises(queue.Empty):
            items.get(timeout=3600.0)
    assert turns.now >= 7200.0


def test_threads_that_nobody_joins_have_ended_with_the_turns() -> None:
    before = threading.active_count()
    for seed in range(20):
        turns = Turns(seed, (__file__,))
        ended: list[int] = []

        def work(number: int, turns: Turns = turns, ended: list[int] = ended) -> None:
            for _ in range(number):
                turns.pass_on()
            ended.append(number)

        with turns.applied():
            for number in range(5):
                _thread.start_new_thread(work, (number,))
        assert sorted(ended) == [*range(5)]
    assert threading.active_count() == before
