"""Moments of a device: looked up once it has come to them, never waited for."""

from __future__ import annotations

import time

import pytest
import torch

from swap.marks import DeviceMarks, HostMark, Mark, marks_on
from swap.timeline import Timeline
from tests.support.fake_events import FakeDevice


def _marks(device: FakeDevice) -> DeviceMarks:
    return DeviceMarks(device.event, lambda: device)


def test_mark_of_a_device_is_known_when_the_device_has_come_to_it() -> None:
    device = FakeDevice()
    mark = _marks(device)
    before = time.perf_counter()
    first = mark()
    device.give(0.25)
    second = mark()
    assert (first.seconds(), second.seconds()) == (None, None)
    device.run()
    start, stop = first.seconds(), second.seconds()
    assert start is not None
    assert stop is not None
    assert stop - start == pytest.approx(0.25, abs=1e-6)
    assert start == pytest.approx(before, abs=5)  # of the same clock
    assert device.num_waits == 1  # as the first was made


def test_moved_mark_is_where_it_was_moved_last_also_when_its_time_was_known() -> None:
    device = FakeDevice()
    mark = _marks(device)
    start, moved = mark(), mark()
    for seconds in (0.5, 0.25):
        device.give(seconds)
        moved.move()
    device.run()
    assert _between(start, moved) == pytest.approx(0.75, abs=1e-6)
    device.give(1.0)
    moved.move()
    assert moved.seconds() is None
    device.run()
    assert _between(start, moved) == pytest.approx(1.75, abs=1e-6)


def test_times_stay_exact_over_a_day_of_float32_milliseconds() -> None:
    device = FakeDevice()
    mark = _marks(device)
    first = mark()
    device.run()
    begin = first.seconds()
    assert begin is not None
    for _ in range(24 * 360):
        device.give(10.0)
        late = mark()
        device.run()
        late.seconds()
    start = mark()
    device.give(0.001)
    stop = mark()
    device.run()
    assert _between(start, stop) == pytest.approx(0.001, abs=2e-6)
    assert _between(first, stop) == pytest.approx(86_400.001, abs=0.01)


def _between(start: Mark, stop: Mark) -> float:
    low, high = start.seconds(), stop.seconds()
    assert low is not None
    assert high is not None
    return high - low


def test_host_mark_is_known_at_once() -> None:
    mark = marks_on(torch.device("cpu"))()
    assert isinstance(mark, HostMark)
    first = mark.seconds()
    mark.move()
    second = mark.seconds()
    assert first is not None
    assert second is not None
    assert first <= second <= time.perf_counter()


def test_span_of_a_device_counts_when_the_device_has_come_to_its_end() -> None:
    device, timeline = FakeDevice(), Timeline()
    mark = _marks(device)
    for _ in range(2):
        start = mark()
        device.give(0.5)
        timeline.add_between("forward", start, mark())
        device.give(0.125)
    assert timeline.events() == []
    assert timeline.count["forward"] == 0
    device.run(until=0.6)
    (event,) = timeline.events()
    assert event.stop - event.start == pytest.approx(0.5, abs=1e-6)
    assert timeline.seconds["forward"] == pytest.approx(0.5, abs=1e-6)
    device.run()
    first, second = timeline.events()
    assert second.start - first.stop == pytest.approx(0.125, abs=1e-6)
    assert timeline.seconds["forward"] == pytest.approx(1.0, abs=1e-6)
    assert timeline.count["forward"] == 2


def test_spans_that_were_open_are_noted_by_the_next_one() -> None:
    device, timeline = FakeDevice(), Timeline()
    mark = _marks(device)
    timeline.add_between("forward", mark(), mark())
    device.run()
    timeline.add_between("backward", mark(), mark())
    assert (timeline.count["forward"], timeline.count["backward"]) == (1, 0)


def test_events_can_be_looked_at_while_a_thread_adds_some() -> None:
    device, timeline = FakeDevice(), Timeline()
    mark = _marks(device)
    timeline.add_between("forward", mark(), mark())
    device.run()
    with timeline._lock:  # an interrupt came just then, and its handler looks
        assert timeline.events() == []
    assert len(timeline.events()) == 1
