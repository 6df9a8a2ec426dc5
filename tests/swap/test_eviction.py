"""What leaves memory: the farthest, for what is used sooner, so that few transfers are made."""

from hypothesis import given
from hypothesis import strategies as st

from swap.plan.eviction import FarthestFirst, for_saved, for_weights
from swap.plan.schedule import Schedule

distances = st.dictionaries(st.integers(0, 20), st.integers(0, 9), max_size=8)


@given(distances=distances)
def test_victim_is_the_first_of_those_used_last(distances: dict[int, int]) -> None:
    victim = FarthestFirst(distances.__getitem__).victim(distances)
    if not distances:
        assert victim is None
        return
    farthest = max(distances.values())
    assert victim == next(key for key, found in distances.items() if found == farthest)


@given(distances=distances, needed=st.integers(0, 9))
def test_nothing_leaves_for_what_is_used_later(distances: dict[int, int], needed: int) -> None:
    wanted = -1
    policy = FarthestFirst({**distances, wanted: needed}.__getitem__)
    victim = policy.victim(distances, ahead_for=wanted)
    if victim is None:
        assert all(found <= needed for found in distances.values())
    else:
        assert distances[victim] == max(distances.values()) > needed


def test_a_backward_pass_keeps_what_it_asks_for_next() -> None:
    policy = for_saved()
    for number in range(8):
        policy.added(number)
    assert policy.victim(range(8)) == 0, "the oldest is asked for last"
    policy.used(4)
    assert policy.victim(range(8)) == 7, "what was used is not asked for again"
    assert policy.victim([0, 3], ahead_for=2) == 0
    assert policy.victim([2, 3], ahead_for=1) is None


def test_weights_leave_by_the_recorded_order() -> None:
    schedule = Schedule()
    for parameter in (0, 1, 2):
        schedule.record(parameter)
    schedule.end_cycle()
    policy = for_weights(schedule)
    schedule.record(0)
    assert policy.victim([1, 2, 0]) == 0
    assert policy.victim([1, 2], ahead_for=0) is None
    assert policy.victim([1, 2], ahead_for=1) == 2


@given(uses=st.lists(st.integers(0, 4), min_size=1, max_size=7), room=st.integers(1, 3))
def test_no_other_choice_makes_fewer_transfers(uses: list[int], room: int) -> None:
    assert _misses_by_the_rule(uses, room) == _least_misses(uses, room)


def _misses_by_the_rule(uses: list[int], room: int) -> int:
    kept: set[int] = set()
    misses = 0
    for now, key in enumerate(uses):
        ahead = uses[now + 1 :]
        if key not in kept:
            misses += 1
            if len(kept) == room:
                next_use = {k: ahead.index(k) if k in ahead else len(uses) for k in kept}
                rule = FarthestFirst(next_use.__getitem__)
                victim = rule.victim(sorted(kept))
                assert victim is not None
                kept.remove(victim)
            kept.add(key)
    return misses


def _least_misses(uses: list[int], room: int) -> int:
    """By trying every choice."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for key in uses:
        after: dict[frozenset[int], int] = {}
        for kept, misses in states.items():
            if key in kept:
                options = [(kept, misses)]
            elif len(kept) < room:
                options = [(kept | {key}, misses + 1)]
            else:
                options = [((kept - {gone}) | {key}, misses + 1) for gone in kept]
            for state, cost in options:
                after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())
