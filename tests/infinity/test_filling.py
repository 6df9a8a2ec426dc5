"""Values on their way into the tiers and out of them: many under way, in large requests."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.records import Record
from swap.plan.layout import CHUNK_BYTES
from tests.support.late_engine import LateEngine
from tests.support.training import same_bits

WIDTH, DEPTH = 512, 6


class Watched(os.PathLike[str]):
    """First values of a model, and how many writes were under way as each was asked for."""

    def __init__(self, engines: list[LateEngine], fails_at: int | None = None) -> None:
        self.under_way: list[int] = []
        self.given: dict[str, torch.Tensor] = {}
        self._engines = engines
        self._fails_at = fails_at

    def __fspath__(self) -> str:
        return "watched"

    def values_for(self, model: nn.Module, records: Sequence[Record]) -> "Watched":
        return self

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for number, record in enumerate(records):
            self.under_way.append(self._engines[0].num_in_flight)
            if number == self._fails_at:
                raise LookupError(f"nothing for {record.name}")
            drawn = torch.randn(record.shape, generator=generator)
            self.given[record.name] = drawn.bfloat16().float()  # which rounding leaves as they are
            yield record, self.given[record.name]

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


def _model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[LateEngine]:
    """Of the blocks that are entered: they carry out nothing before somebody waits for it."""
    made: list[LateEngine] = []

    def make(lanes: int, **_: Any) -> LateEngine:
        made.append(LateEngine(lanes, eager=0.0))
        return made[-1]

    monkeypatch.setattr("swap.storage.opening.Engine", make)
    return made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_values_are_written_while_the_next_are_made(
    nvme: Path, engines: list[LateEngine], dtype: torch.dtype | None
) -> None:
    values, model = Watched(engines), _model()
    least = infinity.plan(model, nvme=nvme, host_memory=1, compute_dtype=dtype).least_host_bytes
    block = infinity.offload(
        model,
        nvme,
        weights=values,
        compute_dtype=dtype,
        host_memory=least,
    )
    with block as offloaded:
        assert max(values.under_way) > 1
        assert engines[0].num_in_flight == 0
        with offloaded.gathered():
            for name, parameter in model.named_parameters():
                assert same_bits(parameter.detach(), values.given[name].to(parameter.dtype))


def test_values_that_cannot_be_made_leave_nothing_under_way(
    nvme: Path, engines: list[LateEngine]
) -> None:
    values, model = Watched(engines, fails_at=2 * DEPTH - 1), _model()
    least = infinity.plan(model, nvme=nvme, host_memory=1).least_host_bytes
    block = infinity.offload(model, nvme, weights=values, host_memory=least)
    with pytest.raises(LookupError, match="nothing for 5"):
        block.__enter__()
    assert values.under_way[-1] > 0
    assert engines[0].num_in_flight == 0
    assert list(nvme.iterdir()) == []


def test_values_come_back_in_large_requests_and_are_kept_once(
    nvme: Path, engines: list[LateEngine]
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    least = infinity.plan(model, nvme=nvme, host_memory=1).least_host_bytes
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        offloaded.flush()
        entered = len(engines[0].log)
    reads = [nbytes for kind, _, nbytes in engines[0].log[entered:] if kind == "read"]
    assert min(reads) > CHUNK_BYTES
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert all(same_bits(weights[name], before[name]) for name in before)
