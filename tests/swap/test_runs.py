"""Which components share a request: runs of what is side by side in slot and file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aio import Engine
from swap.plan.layout import PAGE, Component
from swap.plan.slots import MOST_BYTES, plan_slot
from swap.storage.drives.directory import SwapDirectory
from swap.storage.extents import Extent, ExtentStore
from swap.update.runs import Part, runs_of

STATE = tuple(Component(name, torch.float32) for name in ("master", "exp_avg", "exp_avg_sq"))


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=8))
def test_runs_cover_all_parts_and_only_what_lies_side_by_side(
    drawn: list[tuple[int, bool, bool]],
) -> None:
    parts, place, offset = [], 0, 0
    for number, (pages, has_gap, is_joined) in enumerate(drawn):
        offset += PAGE * has_gap
        nbytes = pages * PAGE
        extent = Extent(0, offset, nbytes)
        pieces = (extent,) if is_joined else ()
        parts.append(Part(str(number), Extent(0, offset, nbytes, pieces), 0, place, nbytes))
        place, offset = place + nbytes, offset + nbytes
    runs = runs_of(parts)
    assert [part for run in runs for part in run.parts] == parts
    for run in runs:
        extent, start = run.source
        assert (run.place.start, run.nbytes) == (
            run.parts[0].place,
            run.place.stop - run.place.start,
        )
        assert sum(run.purposes.values()) == run.nbytes
        for part in run.parts:
            assert part.extent.offset == extent.offset + start + part.place - run.place.start
            assert len(run.parts) == 1 or not part.extent.pieces


def test_runs_of_large_components_are_no_longer_than_the_most() -> None:
    elements = MOST_BYTES // 4 // 2
    plan = plan_slot(STATE, elements)
    assert [sum(sizes) for _, sizes in plan.runs] == [MOST_BYTES, MOST_BYTES // 2]
    assert [len(run) for run, _ in plan_slot(STATE, 4 * elements).runs] == [1, 1, 1]


def test_parts_on_two_directories_are_not_joined() -> None:
    parts = [
        Part("exp_avg", Extent(0, 0, PAGE), 0, 0, PAGE),
        Part("exp_avg_sq", Extent(1, PAGE, PAGE), 0, PAGE, PAGE),
    ]
    assert [len(run.parts) for run in runs_of(parts)] == [1, 1]


def test_adjacent_extents_are_released_one_by_one_and_files_do_not_grow_for_them(
    tmp_path: Path,
) -> None:
    sizes = [2 * PAGE, PAGE, 3 * PAGE]
    with Engine(lanes=3) as engine:
        directory = SwapDirectory(tmp_path, engine)
        store = ExtentStore([directory], engine)
        try:
            assert store.allocate_adjacent(sizes) is None
            assert store.used_bytes == 0
            store.reserve(sum(sizes))
            adjacent = store.allocate_adjacent(sizes)
            assert adjacent is not None
            first, middle, last = adjacent
            assert _ends([first, middle, last])[:2] == [middle.offset, last.offset]
            store.write(middle, 0, np.full(PAGE, 7, np.uint8)).result()
            store.release(first)
            store.release(last)
            assert store.used_bytes == PAGE
            assert store.allocate_adjacent(sizes) is None
            out = np.empty(PAGE, np.uint8)
            store.read(middle, 0, out, urgent=True).result()
            assert (out == 7).all()
            store.release(middle)
            assert store.allocate_adjacent(sizes) == [first, middle, last]
        finally:
            directory.close()


def _ends(extents: Sequence[Extent]) -> list[int]:
    return [extent.offset + extent.nbytes for extent in extents]
