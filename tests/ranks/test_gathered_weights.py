"""Whole weights of slices, where the other rank is played."""

from __future__ import annotations

import mmap
from collections.abc import Sequence, Set
from typing import Any, cast

import pytest
import torch

from infinity.parameters.records import Record
from infinity.ranks.collectives import Ranks
from infinity.ranks.gathered_weights import GatheredWeights, GatherMemory
from swap.cache.owners import Held
from swap.plan import eviction
from swap.tiers import BudgetError
from swap.timeline import Timeline
from tests.support.lru import Lru
from tests.support.played_ranks import TwoRanks, large_of, partitioned_records

MIB = 1 << 20


class _Slices:
    """What stands for this rank's ``WeightCache``: slices of ones times the index."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self.released: list[Any] = []
        self.borrowed: list[int] = []

    def borrow(self, parameter: int) -> torch.Tensor:
        self.borrowed.append(parameter)
        return torch.full((self._records[parameter].spec.numel,), float(parameter + 1))

    def acquire(self, parameters: Sequence[int], holder: object) -> list[torch.Tensor]:
        return [self.borrow(parameter) for parameter in parameters]

    def release(self, holder: object) -> None:
        self.released.append(holder)

    def owner(self, storage: int) -> None:
        return None

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        return []

    def drop(self) -> None:
        self.borrowed.clear()


def _gathered(
    records: list[Record], *, whole: int, prefetch: bool = False
) -> tuple[GatheredWeights, TwoRanks, _Slices]:
    """With room for so many ``whole`` weights."""
    ranks, slices = TwoRanks(), _Slices(records)
    nbytes = large_of(records)[0].weight_bytes
    weights = GatheredWeights(
        records,
        cast(Any, slices),
        cast(Ranks, ranks),
        GatherMemory((whole + 1) * nbytes, torch.device("cpu")),
        capacity_bytes=whole * nbytes,
        timeline=Timeline(),
        prefetch=prefetch,
    )
    return weights, ranks, slices


def test_weights_are_gathered_once_for_as_long_as_there_is_room() -> None:
    records = partitioned_records()
    weights, ranks, _ = _gathered(records, whole=2)
    first, second, third = (record.index for record in large_of(records)[:3])
    for index in (first, second, first, second):
        found = weights.borrow(index)
        assert found[0] == index + 1
        assert found[-1] == (index + 1) * 3.0
    assert len(ranks.transfers) == 2
    del found
    weights.borrow(third)  # by the order of uses the others are as far away: one has to leave
    assert len(ranks.transfers) == 3


def test_another_policy_says_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "for_weights", Lru)
    records = partitioned_records()
    weights, ranks, _ = _gathered(records, whole=2)
    first, second, third = (record.index for record in large_of(records)[:3])
    for index in (first, second, first, third, first):
        assert weights.borrow(index)[0] == index + 1
    assert len(ranks.transfers) == 3, "the first was used last, and stayed"
    weights.borrow(second)
    assert len(ranks.transfers) == 4


def test_held_weights_stay_and_without_room_the_error_names_what_was_wanted() -> None:
    records = partitioned_records()
    weights, _ranks, slices = _gathered(records, whole=1)
    first, second = large_of(records)[:2]
    held = weights.acquire([first.index], "holder")
    with pytest.raises(BudgetError, match=second.name):
        weights.borrow(second.index)
    assert weights.owner(held[0].untyped_storage()._cdata) == first.index
    weights.release("holder")
    assert "holder" in slices.released
    del held
    assert weights.borrow(second.index)[0] == second.index + 1


def test_after_a_step_updated_weights_are_gathered_anew() -> None:
    records = partitioned_records()
    weights, ranks, _ = _gathered(records, whole=3)
    first, second = (record.index for record in large_of(records)[:2])
    for index in (first, second):
        weights.borrow(index)
    weights.end_step([first])
    weights.borrow(second)
    assert len(ranks.transfers) == 2
    weights.borrow(first)
    assert len(ranks.transfers) == 3
    weights.drop()
    weights.borrow(second)
    assert len(ranks.transfers) == 4


def test_what_the_schedule_has_next_is_on_its_way() -> None:
    records = partitioned_records()
    weights, ranks, _ = _gathered(records, whole=2, prefetch=True)
    order = [record.index for record in large_of(records)]
    for index in order:
        weights.borrow(index)
    weights.end_step(order)
    weights.borrow(order[0])
    assert len(ranks.transfers) == len(order) + 2
    assert not ranks.transfers[-1].has_arrived
    weights.borrow(order[1])
    assert ranks.transfers[len(order) + 1].has_arrived


def test_what_was_expected_in_vain_holds_no_slice_when_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices of passes in another order took all room for them: no room, on one rank alone."""
    records = partitioned_records()
    weights, ranks, slices = _gathered(records, whole=4, prefetch=True)
    order = [record.index for record in large_of(records)]
    for index in order:
        weights.borrow(index)
    weights.end_step(order)
    weights.borrow(order[0])
    expected, borrow = ranks.transfers[-1], slices.borrow
    assert not expected.has_arrived

    def read(parameter: int) -> torch.Tensor:
        assert expected.has_arrived
        return borrow(parameter)

    monkeypatch.setattr(slices, "borrow", read)
    weights.borrow(order[3])


def test_what_is_on_its_way_is_held_by_nobody() -> None:
    """The transfer refers to it, and writes to it from another thread."""
    records = partitioned_records()
    weights, ranks, _ = _gathered(records, whole=2, prefetch=True)
    order = [record.index for record in large_of(records)]
    for index in order:
        weights.borrow(index)
    weights.end_step(order)
    first = weights.borrow(order[0]).view(-1)
    assert not ranks.transfers[-1].has_arrived
    assert [held.parameter for held in weights.held({*order})] == [order[0]]
    del first
    assert not weights.held({*order})


def test_memory_is_taken_by_all_ranks_or_none() -> None:
    memory = GatherMemory(MIB, torch.device("cpu"))
    asked: list[str] = []
    memory.make_room.append(lambda: asked.append("given back"))

    def short_on_the_other(is_short: int) -> list[list[int]]:
        return [[0, 0, 0, is_short], [0, 0, 0, 1]]

    assert memory.take(16, torch.float32, short_on_the_other) is None
    assert asked == ["given back"]
    found = memory.take(16, torch.float32, lambda is_short: [[0, 0, 0, is_short]] * 2)
    assert found is not None
    assert found.shape == (16,)
    memory.close()


def test_memory_is_found_wherever_it_is_free_on_a_rank() -> None:
    page = mmap.PAGESIZE
    memory = GatherMemory(9 * page, torch.device("cpu"))

    def take(pages: int) -> torch.Tensor | None:
        nbytes = pages * page
        return memory.take(nbytes, torch.uint8, lambda is_short: [[0, 0, 0, is_short]])

    held = [take(pages) for pages in (3, 1, 2, 1, 2)]
    assert all(tensor is not None for tensor in held)
    del held[0], held[1], held[2]
    assert take(5) is not None
    assert memory.peak_host_bytes == 9 * page
    memory.close()
