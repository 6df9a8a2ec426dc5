"""Totals, spans and the arithmetic over events, against counting unit by unit."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swap.timeline import Event, Timeline, busy_seconds, overlap_seconds, without

KINDS = ("read", "write", "kernel")
events = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 8)), max_size=12
).map(lambda drawn: [Event(kind, float(at), float(at + n), 0, "") for kind, at, n in drawn])
some_kinds = st.sets(st.sampled_from(KINDS)).map(tuple)


def _units(events: list[Event], kinds: tuple[str, ...]) -> set[int]:
    return {
        unit
        for event in events
        if event.kind in kinds
        for unit in range(int(event.start), int(event.stop))
    }


@given(events=events, kinds=some_kinds)
def test_busy_seconds_counts_every_moment_once(events: list[Event], kinds: tuple[str, ...]) -> None:
    assert busy_seconds(events, kinds) == len(_units(events, kinds))


@given(events=events, first=some_kinds, second=some_kinds)
def test_overlap_is_when_all_groups_are_at_work(
    events: list[Event], first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    both = _units(events, first) & _units(events, second)
    assert overlap_seconds(events, first, second) == len(both)


@given(events=events, kinds=some_kinds, hole=st.sampled_from(KINDS))
def test_without_cuts_holes_and_nothing_else(
    events: list[Event], kinds: tuple[str, ...], hole: str
) -> None:
    pieces = without(events, kinds, hole)
    holes = _units(events, (hole,))
    for kind in kinds:
        left = _units([piece for piece in pieces if piece.kind == kind], (kind,))
        assert left == _units(events, (kind,)) - holes
    assert {piece.kind for piece in pieces} <= set(kinds)


def test_totals_add_up_over_threads() -> None:
    timeline = Timeline()

    def work() -> None:
        for _ in range(200):
            timeline.add("read", 1.0, 1.5, nbytes=10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (timeline.count["read"], timeline.nbytes["read"]) == (800, 8000)
    assert timeline.seconds["read"] == 400.0
    assert len(timeline.events()) == 800


def test_span_is_recorded_when_its_body_raises() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="inside"), timeline.span("stall", label="w"):
        raise ValueError("inside")
    (event,) = timeline.events()
    assert (event.kind, event.label) == ("stall", "w")
    assert timeline.started_at <= event.start <= event.stop


def test_events_are_those_that_ended_later() -> None:
    timeline = Timeline()
    timeline.add("read", 0.0, 1.0)
    timeline.add("write", 0.5, 2.0)
    assert [event.kind for event in timeline.events(since=1.0)] == ["write"]
