"""``infinity.plan`` for one of many ranks: what it keeps, gathers, moves and writes."""

from pathlib import Path

import pytest

import infinity
from infinity.parameters.partition import Share, partition
from infinity.parameters.records import records_of
from swap.plan.layout import PIECE
from tests.support.models import Stack

GIB = 1 << 30
MANY = 70 * 10**9


@pytest.mark.parametrize("world_size", [3, 64, 512])
def test_a_rank_of_many_keeps_its_part(world_size: int) -> None:
    plan = infinity.plan(MANY, host_memory="16GiB", world_size=world_size)
    assert plan.num_parameters == MANY
    kept = sum(plan.bytes_by_tier.values())
    # Weights with the low halves of their masters, two moments, a gradient.
    assert kept == pytest.approx(14 * MANY / world_size, rel=0.01)
    assert plan.fits
    assert plan.host_bytes <= 16 << 30


def test_all_ranks_write_what_one_would() -> None:
    one = infinity.plan(MANY, host_memory="13GiB")
    rank = infinity.plan(MANY, host_memory="13GiB", world_size=64)
    assert rank.written_bytes_per_step * 64 == pytest.approx(one.written_bytes_per_step, rel=0.1)
    assert rank.wear.steps == pytest.approx(64 * one.wear.steps, rel=0.1)


@pytest.mark.parametrize("world_size", [1, 2, 512])
def test_the_least_budget_fits_and_a_byte_less_does_not(world_size: int) -> None:
    least = infinity.plan(10**9, host_memory=1, world_size=world_size).least_host_bytes
    for nbytes, fits in ((least, True), (least - 1, False)):
        plan = infinity.plan(10**9, host_memory=nbytes, world_size=world_size)
        assert plan.fits is fits
        assert plan.least_host_bytes == least


def test_a_model_is_cut_as_it_is_when_it_is_offloaded(tmp_path: Path) -> None:
    model = Stack()
    plan = infinity.plan(model, tmp_path, host_memory=GIB, world_size=2)
    kept = [
        sum(r.spec.numel for r in records_of(model, None, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    # Weights, two moments and a gradient in float32, of slices padded to whole pieces.
    padding = 16 * PIECE * len(list(model.parameters()))
    assert 16 * max(kept) <= sum(plan.bytes_by_tier.values()) <= 16 * max(kept) + padding


def test_level_cuts_are_those_that_were_made_one_by_one() -> None:
    shares = [
        Share(numel=n * PIECE, bytes_per_element=14, row=PIECE, always_on_host=False)
        for n in (8, 9, 8)
    ]
    lengths = [cut.lengths for cut in partition(shares, 4)]
    assert lengths[0] == lengths[2] == [2 * PIECE] * 4
    assert sorted(lengths[1]) == [2 * PIECE] * 3 + [3 * PIECE]


def test_a_world_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        infinity.plan(10**9, host_memory=GIB, world_size=0)
