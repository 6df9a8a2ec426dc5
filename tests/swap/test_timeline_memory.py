"""A timeline takes as much memory after any number of events as after the first ones."""

import tracemalloc

import swap.timeline
from swap.timeline import Timeline

MIB = 1 << 20


def test_a_timeline_of_many_events_keeps_within_a_few_megabytes() -> None:
    timeline = Timeline()
    tracemalloc.start()
    try:
        for index in range(2 * swap.timeline._RING):
            label = f"subgroup {index % 100} exp_avg"
            timeline.add("read", index + 0.1, index + 0.2, nbytes=index + 1000, label=label)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10 * MIB
    assert timeline.count["read"] == 2 * swap.timeline._RING
