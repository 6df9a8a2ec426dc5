"""Memory of many tensors in few mappings: given back when each of them is gone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from checkpoint.tensors.arenas import Arenas

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_ranges_are_zeroed_apart_and_many_to_a_mapping() -> None:
    arenas, before = Arenas(), mappings()
    ranges = [arenas.allocate(nbytes) for nbytes in [5, 4096, 5000, *[1 << 16] * 400]]
    assert mappings() - before < 20
    for number, values in enumerate(ranges):
        assert not values.any()
        values[:] = number % 251 + 1
    for number, values in enumerate(ranges):
        assert bool((values == number % 251 + 1).all())


def test_memory_that_is_let_go_of_is_given_back_without_running_python() -> None:
    arenas = Arenas()
    ranges = [arenas.allocate(32 * MIB) for _ in range(3)]
    for values in ranges:
        values[:] = 1
    full = resident_bytes()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    ranges[0] = np.empty(0, np.uint8)
    sys.setprofile(None)
    assert calls == []
    assert resident_bytes() < full - 24 * MIB
    assert bool(ranges[1].all())
    assert bool(ranges[2].all())


def test_an_arena_outlives_whoever_handed_it_out() -> None:
    values = Arenas().allocate(5 * MIB)
    values[:] = 3
    assert int(values.sum()) == 15 * MIB
