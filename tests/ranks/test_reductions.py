"""Means of gradients over ranks, where the other rank is played."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from infinity.parameters.records import Record
from infinity.ranks.collectives import Ranks
from infinity.ranks.gathered_weights import GatherMemory
from infinity.ranks.reductions import Reductions, mean_of
from swap.tiers import BudgetError
from tests.support.played_ranks import TwoRanks, large_of, lose, partitioned_records

MIB = 1 << 20


class _Stored(dict[int, torch.Tensor]):
    def store(self, index: int, mean: torch.Tensor) -> None:
        assert index not in self
        self[index] = mean.clone()


def _reductions(ranks: TwoRanks, records: list[Record]) -> tuple[Reductions, _Stored]:
    stored = _Stored()
    memory = GatherMemory(8 * MIB, torch.device("cpu"))
    return Reductions(records, cast(Ranks, ranks), memory, stored.store, lose), stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_of_parts_is_that_of_their_sum_in_order(dtype: torch.dtype) -> None:
    parts = [torch.randn(1000).to(dtype) for _ in range(3)]
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).div(3).to(dtype)
    assert torch.equal(mean_of(parts), expected)


def test_two_gradients_are_under_way_and_the_oldest_is_stored_for_a_third() -> None:
    ranks, records = TwoRanks(), partitioned_records()
    large = large_of(records)
    reductions, stored = _reductions(ranks, records)
    gradients = [torch.randn(record.shape) for record in large]
    for record, gradient in zip(large[:2], gradients, strict=False):
        reductions.add(record.index, gradient)
    assert not stored
    assert all(reductions.has(record.index) for record in large[:2])
    reductions.add(large[2].index, gradients[2])
    assert [*stored] == [large[0].index]
    assert not reductions.has(large[0].index)
    reductions.finish()
    for record, gradient in zip(large[:3], gradients, strict=False):
        own = gradient.view(-1)[: record.spec.numel]
        assert torch.equal(stored[record.index], (own + own * 3.0) / 2)


def test_small_gradients_travel_together_when_all_have_come() -> None:
    ranks, records = TwoRanks(), partitioned_records()
    small = [record for record in records if not record.is_partitioned]
    reductions, stored = _reductions(ranks, records)
    for record in small:
        reductions.add(record.index, torch.full(record.shape, float(record.index)))
    assert not ranks.transfers
    reductions.finish()
    assert len(ranks.transfers) == 1
    for record in small:
        assert torch.equal(stored[record.index], torch.full(record.shape, float(record.index)))


def test_dropped_gradients_are_not_stored() -> None:
    ranks, records = TwoRanks(), partitioned_records()
    reductions, stored = _reductions(ranks, records)
    first, second = large_of(records)[:2]
    small = next(record for record in records if not record.is_partitioned)
    for record in (first, second, small):
        reductions.add(record.index, torch.ones(record.shape))
    reductions.drop(first.index)
    reductions.drop(small.index)
    assert not reductions.has(first.index)
    reductions.finish()
    assert [*stored] == [second.index]
    reductions.add(second.index, torch.ones(second.shape))
    reductions.drop()
    assert not reductions.has(second.index)


def test_a_gradient_without_room_names_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.ranks.gathered_weights._RELEASE_SECONDS", 0.0)
    records = partitioned_records()
    memory = GatherMemory(4096, torch.device("cpu"))
    reductions = Reductions(records, cast(Ranks, TwoRanks()), memory, _Stored().store, lose)
    record = large_of(records)[0]
    with pytest.raises(BudgetError, match=f"the gradient of {record.name}"):
        reductions.add(record.index, torch.ones(record.shape))


def test_a_gradient_of_one_element_may_have_any_stride() -> None:
    """As a parameter of shape (1,) has that is stacked with others."""
    ranks, records = TwoRanks(), partitioned_records()
    small = next(record for record in records if not record.is_partitioned)
    reductions, stored = _reductions(ranks, records)
    column = torch.full((1, 2), 5.0)[:, 0]
    assert column.stride() == (2,)
    reductions.add(small.index, column)
    reductions.finish()
    assert torch.equal(stored[small.index], column)


def test_small_gradients_without_memory_to_send_them_are_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were forgotten, and the other ranks waited for them."""
    ranks, records = TwoRanks(), partitioned_records()
    small = next(record for record in records if not record.is_partitioned)
    reductions, stored = _reductions(ranks, records)
    reductions.add(small.index, torch.full(small.shape, 5.0))

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("infinity.ranks.reductions.torch.zeros", full)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            reductions.finish()
    assert ranks.meetings == []
    reductions.finish()
    assert torch.equal(stored[small.index], torch.full(small.shape, 5.0))
