"""The path to a device and back, with a device that is host memory: as on CUDA, but for streams."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import arguments
from swap.cache.device_arena import HostLink
from swap.plan.placement import Placement, place
from swap.tiered import TieredState
from swap.tiers import Budget
from tests.support.models import Gpt, token_loss
from tests.support.proof import matrix
from tests.support.training import (
    WHOLE,
    Outcome,
    assert_same_runs,
    budgets,
    train,
)

_DEVICE_BYTES = 3 << 20
CASES = [*product((torch.float32, torch.bfloat16), (None, 0.3))]


@pytest.fixture
def separate_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offloading computes from an arena of its own, reached by copies alone."""
    make_budget = arguments.make_budget

    def place_apart(*given: Any, **options: Any) -> Placement:
        return place(*given, **(options | {"separate_device": True}))

    def bounded(*given: Any) -> Budget:
        return replace(make_budget(*given), device_bytes=_DEVICE_BYTES)

    def link(self: TieredState) -> HostLink:
        return HostLink()

    with monkeypatch.context() as patch:
        patch.setattr("infinity.planning.placing.place", place_apart)
        patch.setattr(arguments, "make_budget", bounded)
        patch.setattr(TieredState, "_make_link", link)
        yield


@pytest.mark.parametrize(("dtype", "max_grad_norm"), matrix(CASES, usual=[CASES[-1]]))
def test_training_on_a_separate_device_has_the_same_bits(
    tmp_path: Path,
    dtype: torch.dtype,
    max_grad_norm: float | None,
    request: pytest.FixtureRequest,
) -> None:
    options: dict[str, Any] = {"compute_dtype": dtype, "max_grad_norm": max_grad_norm}
    runs: dict[str, Outcome] = {
        "in memory": train(Gpt, token_loss, tmp_path, host_memory=WHOLE, steps=6, **options)
    }
    request.getfixturevalue("separate_device")
    for name, host_memory in budgets(Gpt, tmp_path, **options).items():
        runs[name] = train(Gpt, token_loss, tmp_path, host_memory=host_memory, steps=6, **options)
    assert runs["least"].read_bytes > 0
    assert_same_runs(runs)


def test_device_budget_holds_while_weights_pass_through(
    tmp_path: Path, separate_device: None
) -> None:
    model = Gpt()
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        for step in range(3):
            token_loss(model, step).backward()
            offloaded.step()
        arena = offloaded._training.state.arena
        assert arena is not None
        assert 0 < arena.peak_bytes <= _DEVICE_BYTES
