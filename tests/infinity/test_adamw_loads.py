"""What of weights and gradients passes a link at once, and how much memory that takes."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity import OffloadedAdamW
from infinity.adamw.tiers.loads import (
    LEAST_LINK_BYTES,
    MOST_LINK_BYTES,
    NUM_SLOTS,
    Wanted,
    link_sizes,
    loads_of,
)
from swap.plan.layout import DEVICE_ALIGNMENT, PIECE, Segment
from swap.tiers import BudgetError
from tests.support.adamw_model import make_model
from tests.support.simulated_device.injected import simulated

MIB = 1 << 20
LEAST_SLOT = LEAST_LINK_BYTES // NUM_SLOTS

wanted = st.builds(
    lambda number, length, done, weight, gradient: Wanted(
        Segment(parameter=number, subgroup=0, start=0, length=length, offset=0),
        min(done * PIECE, length),
        weight,
        gradient,
    ),
    st.integers(0, 9),
    st.integers(0, 50 * PIECE),
    st.integers(0, 9),
    st.sampled_from([2, 4]),
    st.sampled_from([2, 4]),
)


@given(st.lists(wanted, max_size=12), st.integers(1, 5))
def test_loads_have_all_that_is_wanted_once_and_in_order(all_wanted: list[Wanted], n: int) -> None:
    slot_bytes = n * LEAST_SLOT
    loads = loads_of(all_wanted, slot_bytes)
    assert all(loads)
    pieces = iter(piece for load in loads for piece in load)
    for one in all_wanted:
        start = one.start
        while start < one.segment.length:
            piece = next(pieces)
            assert (piece.segment, piece.start) == (one.segment, start)
            assert piece.stop == one.segment.length or piece.stop % PIECE == 0
            start = piece.stop
    assert next(pieces, None) is None


@given(st.lists(wanted, max_size=12, unique_by=lambda one: one.segment))
def test_loads_fit_their_slot_and_nothing_in_them_overlaps(all_wanted: list[Wanted]) -> None:
    sizes = {one.segment: (one.weight_itemsize, one.gradient_itemsize) for one in all_wanted}
    for load in loads_of(all_wanted, LEAST_SLOT):
        stop = 0
        for piece in load:
            weight, gradient = (size * (piece.stop - piece.start) for size in sizes[piece.segment])
            assert piece.weight_start >= stop
            assert piece.gradient_start >= piece.weight_start + weight
            starts = piece.weight_start, piece.gradient_start
            assert all(start % DEVICE_ALIGNMENT == 0 for start in starts)
            stop = piece.gradient_start + gradient
        assert stop <= LEAST_SLOT


def test_small_parameters_go_together() -> None:
    segments = [Segment(parameter=n, subgroup=0, start=0, length=700, offset=0) for n in range(20)]
    assert len(loads_of([Wanted(segment, 0, 2, 2) for segment in segments], LEAST_SLOT)) == 1


@given(st.integers(0, 1 << 40))
def test_slots_of_a_link_are_whole_pages_between_two_bounds(budget: int) -> None:
    sizes = link_sizes(budget)
    assert sizes[-1] == LEAST_LINK_BYTES <= sizes[0] <= MOST_LINK_BYTES
    assert sizes[0] in (LEAST_LINK_BYTES, MOST_LINK_BYTES) or sizes[0] <= budget / 16
    assert all(size % (NUM_SLOTS * PIECE) == 0 for size in sizes)


@pytest.mark.parametrize("budget", [64 * MIB, 1 << 30])
def test_memory_of_a_link_is_part_of_the_budget(budget: int, tmp_path: Path) -> None:
    with OffloadedAdamW(make_model().parameters(), nvme=tmp_path, host_memory=budget) as optimizer:
        without = optimizer.report().host_bytes
    with simulated() as devices:
        parameters = make_model().parameters()
        with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=budget) as optimizer:
            (registered,) = devices[0]._slabs
            link_bytes = registered[1] - registered[0]
            assert link_bytes == link_sizes(budget)[0]
            assert optimizer.report().host_bytes == without + link_bytes


def test_least_budget_with_a_link_is_told_and_works(tmp_path: Path) -> None:
    def made(host_memory: int) -> OffloadedAdamW:
        return OffloadedAdamW(make_model().parameters(), nvme=tmp_path, host_memory=host_memory)

    with simulated():
        with pytest.raises(BudgetError) as error:
            made(1)
        least = error.value.least_host_bytes
        with pytest.raises(BudgetError):
            made(least - 1)
        with made(least) as optimizer:
            report = optimizer.report()
            assert report.host_bytes <= least
            assert report.nvme_bytes > 0


def test_link_takes_what_is_enough_where_more_would_not_fit(tmp_path: Path) -> None:
    """A link of a sixteenth of the budget would leave too little for what is there already."""
    budget = 48 * MIB
    with (
        simulated(),
        OffloadedAdamW(make_model().parameters(), nvme=tmp_path, host_memory=budget) as optimizer,
    ):
        store = optimizer._engine.store
        (device,) = store.links
        del store.links[device]
        taken = budget - store.checkpoint_bytes - LEAST_LINK_BYTES - store._taken.host_bytes
        store.add([], caller_bytes=taken, devices=[device])
        assert store.links[device].slot_bytes * NUM_SLOTS == LEAST_LINK_BYTES


def test_what_is_said_to_hold_all_of_the_state_does_and_so_does_more(tmp_path: Path) -> None:
    """The link takes less there: with that, no step moves any state."""
    parameters = [nn.Parameter(torch.zeros(1_000_000)) for _ in range(16)]

    def nvme_bytes(host_memory: int) -> int:
        with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=host_memory) as optimizer:
            assert optimizer.report().host_bytes <= host_memory
            return optimizer.report().nvme_bytes

    with simulated():
        with pytest.raises(BudgetError, match="would hold all of it") as error:
            nvme_bytes(1)
        told = re.search(r"\((\d+) bytes\) would hold all", str(error.value))
        assert told is not None
        whole = int(told[1])
        assert nvme_bytes(whole - 1) > 0
        assert [nvme_bytes(whole + more) for more in (0, 1, 4 * MIB, 16 * MIB)] == [0] * 4
