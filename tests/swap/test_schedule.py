"""The schedule against what it says: a plan recorded once, followed, and left only for good."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from swap.plan.schedule import NEVER, Schedule

uses = st.lists(st.integers(0, 6), min_size=1, max_size=20)


def _without_repeats(cycle: list[int]) -> tuple[int, ...]:
    return tuple(use for i, use in enumerate(cycle) if i == 0 or cycle[i - 1] != use)


def _run(schedule: Schedule, cycle: list[int]) -> None:
    for use in cycle:
        schedule.record(use)
    schedule.end_cycle()


@given(cycle=uses)
def test_first_cycle_becomes_the_plan(cycle: list[int]) -> None:
    schedule = Schedule()
    assert schedule.plan == ()
    assert schedule.distance(cycle[0]) == schedule.first_use(cycle[0]) == NEVER
    _run(schedule, cycle)
    assert schedule.plan == _without_repeats(cycle)
    assert schedule.expected_uses == schedule.unexpected_uses == 0


@given(cycle=uses, rounds=st.integers(1, 3))
def test_cycles_that_follow_the_plan_are_expected_throughout(cycle: list[int], rounds: int) -> None:
    schedule = Schedule()
    _run(schedule, cycle)
    for _ in range(rounds):
        for position, use in enumerate(_without_repeats(cycle)):
            assert schedule.distance(use) == 0
            upcoming = list(schedule.upcoming())
            assert tuple(upcoming) == schedule.plan[position:] + schedule.plan[:position]
            schedule.record(use)
        schedule.end_cycle()
    assert schedule.unexpected_uses == 0
    assert schedule.expected_uses == rounds * len(schedule.plan)


@given(cycle=uses, others=st.lists(st.integers(0, 9), max_size=10))
def test_one_departure_does_not_replace_the_plan_and_two_in_a_row_do(
    cycle: list[int], others: list[int]
) -> None:
    schedule = Schedule()
    _run(schedule, cycle)
    plan = schedule.plan
    departed = [*others, 99]
    _run(schedule, departed)
    assert schedule.plan == plan
    _run(schedule, cycle)
    assert schedule.plan == plan
    _run(schedule, departed)
    assert schedule.plan == plan
    _run(schedule, departed)
    assert schedule.plan == _without_repeats(departed)


@given(cycle=uses)
def test_empty_cycles_never_erase_the_plan(cycle: list[int]) -> None:
    schedule = Schedule()
    _run(schedule, cycle)
    for _ in range(3):
        schedule.end_cycle()
    assert schedule.plan == _without_repeats(cycle)


@given(cycle=uses, script=st.lists(st.integers(0, 9), max_size=30))
def test_distance_is_where_upcoming_finds_it_wherever_the_cursor_is(
    cycle: list[int], script: list[int]
) -> None:
    schedule = Schedule()
    _run(schedule, cycle)
    for use in script:
        schedule.record(use)
        upcoming = list(schedule.upcoming())
        assert sorted(upcoming) == sorted(schedule.plan)
        for parameter in range(10):
            expected = upcoming.index(parameter) if parameter in upcoming else NEVER
            assert schedule.distance(parameter) == expected
            in_plan = parameter in schedule.plan
            assert schedule.first_use(parameter) == (
                schedule.plan.index(parameter) if in_plan else NEVER
            )


@given(cycle=uses, script=st.lists(st.integers(0, 9), max_size=30))
def test_unexpected_use_moves_the_cursor_behind_itself(cycle: list[int], script: list[int]) -> None:
    schedule = Schedule()
    _run(schedule, cycle)
    for use in script:
        before = list(schedule.upcoming())
        repeated = schedule.expected_uses + schedule.unexpected_uses
        schedule.record(use)
        if schedule.expected_uses + schedule.unexpected_uses == repeated:
            assert list(schedule.upcoming()) == before  # the same use again, counted once
        elif use in before:
            at = before.index(use) + 1
            assert list(schedule.upcoming()) == before[at:] + before[:at]
        else:
            assert list(schedule.upcoming()) == before


def test_cursor_starts_again_with_every_cycle() -> None:
    schedule = Schedule()
    _run(schedule, [1, 2, 3])
    schedule.record(1)
    schedule.end_cycle()
    assert list(islice(schedule.upcoming(), 1)) == [1]
