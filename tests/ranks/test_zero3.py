"""What a step depends on is made the same on all ranks, where the other rank is played."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infinity.parameters.records import Record
from infinity.ranks.agreement import RankDifferenceError
from infinity.ranks.collectives import STEP, Ranks
from infinity.ranks.gathered_weights import GatherMemory
from infinity.ranks.zero3 import Zero3
from swap.tiered import TieredState
from swap.timeline import Timeline
from tests.support.played_ranks import TwoRanks, large_of, lose, partitioned_records

BLOCK = 4096


class _Coordinator:
    """Of rank 0: what rank 1 says is ours, changed by ``differs``."""

    is_open = True

    def __init__(self) -> None:
        self.differs: dict[str, Any] = {}

    def exchange(self, facts: Any) -> list[Any]:
        return [facts, {**facts, **self.differs} if isinstance(facts, dict) else facts]

    def gather(self, own: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Of rank 1, every block has twice the squares of the block that we have there."""
        assert len(own) == lengths[0]
        return [own, 2 * own[: lengths[1]]]


class _Ranks(TwoRanks):
    """``digest_of`` is what rank 1 has for a digest of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = _Coordinator()
        self.saving = None
        self.names: list[str] = []
        self.left: list[BaseException] = []
        self.digest_of = lambda digest: digest

    def meet(self, kind: int, number: int, digest: int = 0) -> list[list[int]]:
        ours, _ = super().meet(kind, number, digest)
        return [ours, [kind, number, 0, self.digest_of(digest)]]

    def leave_training(self, error: BaseException) -> None:
        self.left.append(error)


class _Gradients:
    """What this rank keeps: ones."""

    keep_blocks = False

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self.present: frozenset[int] = frozenset()

    lose = staticmethod(lose)

    def block_squares(self, index: int) -> torch.Tensor:
        numel = self._records[index].spec.numel
        sizes = [min(BLOCK, numel - at) for at in range(0, numel, BLOCK)]
        return torch.tensor(sizes, dtype=torch.float64)

    def read(self, index: int) -> torch.Tensor:
        return torch.ones(self._records[index].spec.numel)


class _Components:
    """Weights of this rank: their parameter's number, and one more."""

    def read(self, index: int, name: str, start: int, out: torch.Tensor) -> None:
        assert name == "weight"
        out.fill_(index + 1)


@pytest.fixture
def records() -> list[Record]:
    return partitioned_records()


def _over(records: list[Record]) -> tuple[Zero3, _Ranks, _Gradients]:
    ranks, gradients = _Ranks(), _Gradients(records)
    state = SimpleNamespace(
        weights=SimpleNamespace(drop=lambda: None),
        timeline=Timeline(),
        gradients=gradients,
        add_gradient=lambda index, gradient: None,
        device=torch.device("cpu"),
        components=_Components(),
    )
    made = Zero3(
        cast(Ranks, ranks),
        records,
        cast(TieredState, state),
        GatherMemory(1 << 20, torch.device("cpu")),
        capacity_bytes=1 << 20,
        prefetch=False,
    )
    return made, ranks, gradients


def test_norm_is_that_of_the_slices_of_all_ranks_and_of_small_gradients_once(
    records: list[Record],
) -> None:
    over, _, gradients = _over(records)
    large = large_of(records)[0]
    small = next(record for record in records if not record.is_partitioned)
    assert gradients.keep_blocks
    assert over.norm() == 0.0
    gradients.present = frozenset({large.index, small.index})
    assert over.norm() == math.sqrt(3 * large.spec.numel + small.numel)
    assert 2 * large.spec.numel == large.numel


def test_weights_and_gradients_of_all_ranks_make_whole_ones(records: list[Record]) -> None:
    over, _, _ = _over(records)
    record = large_of(records)[1]
    for whole, value in ((over.weight_of(record), record.index + 1), (over.gradient(record), 1)):
        assert whole.shape == record.shape
        assert whole.view(-1)[0] == value
        assert whole.view(-1)[-1] == value * 3.0
    small = next(record for record in records if not record.is_partitioned)
    assert torch.equal(over.gradient(small), torch.ones(small.shape))


def _begin(over: Zero3, records: Sequence[Record], lr: float = 0.1) -> None:
    groups = [{"params": [record.parameter for record in records], "lr": lr}]
    over.begin_step([0], [0] * len(records), groups, {})


def test_a_step_that_is_the_same_on_all_ranks_takes_one_meeting(records: list[Record]) -> None:
    over, ranks, _ = _over(records)
    _begin(over, records)
    assert [kind for kind, _ in ranks.meetings] == [STEP]


@pytest.mark.parametrize(
    ("fact", "theirs"),
    [
        ("lr of parameter group 0", "0.2"),
        ("which parameter groups 1.weight is in", [1]),
        ("whether 1.weight has a gradient", True),
        ("the step count of 0.weight", 7),
    ],
)
def test_a_step_that_differs_is_refused_naming_what_does(
    fact: str, theirs: object, records: list[Record]
) -> None:
    over, ranks, _ = _over(records)
    ranks.digest_of = lambda digest: digest + 1
    ranks.coordinator.differs = {fact: theirs}
    with pytest.raises(
        RankDifferenceError, match=f"{fact} is .* on rank 0 and {re.escape(str(theirs))}"
    ):
        _begin(over, records)


def test_first_values_are_cut_and_compared_whole(records: list[Record]) -> None:
    over, ranks, _ = _over(records)
    record = large_of(records)[0]
    values = torch.arange(record.numel, dtype=torch.float32).view(record.shape)
    kept = over.note(record, values)
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(kept, values.view(-1)[: record.spec.numel])
    over.agree_on_values()
    over.note(record, values)
    ranks.coordinator.differs = {f"the values of {record.name}": 1}
    with pytest.raises(RankDifferenceError, match="make the model alike on every rank"):
        over.agree_on_values()


def test_a_change_that_another_rank_did_not_make_is_refused_by_name(records: list[Record]) -> None:
    over, ranks, _ = _over(records)
    record = large_of(records)[0]
    ranks.digest_of = lambda digest: digest + 1
    with pytest.raises(
        RankDifferenceError, match=f"{record.name} was given other values on rank 1"
    ):
        over.write_back([record])


def test_an_error_that_leaves_the_block_is_told_and_a_good_end_is_not(
    records: list[Record],
) -> None:
    over, ranks, _ = _over(records)
    over.leave(None)
    assert ranks.left == []
    error = ValueError("of the program")
    over.leave(error)
    assert ranks.left == [error]
    assert over.is_whole
