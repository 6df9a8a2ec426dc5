"""Budgets of a device with memory of its own: the least that plans name, what lands, and which
device an argument means.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import arguments
from infinity.optim.adamw import AdamRule
from swap.plan.layout import ParameterSpec
from swap.plan.placement import place
from swap.plan.traffic import traffic_of
from swap.tiers import Budget, BudgetError
from tests.support.models import Gpt, seeded, token_loss
from tests.support.simulated_device.injected import simulated

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("given", "meant"), [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_device_has_its_index_from_the_argument_on(
    given: str | None, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its gradients would be on another device than the one that they are asked about."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert arguments.device_of(given) == torch.device(meant)


def test_plan_names_the_least_device_budget_which_works_and_none_below_does(
    tmp_path: Path,
) -> None:
    with simulated():
        plan = infinity.plan(Gpt(), tmp_path, host_memory="1GiB")
        least: dict[str, Any] = {
            "host_memory": plan.least_host_bytes,
            "device_memory": plan.least_device_bytes,
        }
        model = seeded(Gpt)
        with infinity.offload(model, tmp_path, **least) as offloaded:
            for step in range(3):
                token_loss(model, step).backward()
                offloaded.step()
        below = least | {"device_memory": plan.least_device_bytes - 1}
        with (
            pytest.raises(BudgetError, match="device_memory"),
            infinity.offload(Gpt(), tmp_path, **below),
        ):
            pass


class _Small(nn.Module):
    """Nothing but parameters that stay in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


def test_small_parameters_take_room_on_the_device(tmp_path: Path) -> None:
    with simulated():
        assert infinity.plan(_Small(), tmp_path).least_device_bytes >= 2 * 64 * 64 * 4
    assert infinity.plan(_Small(), tmp_path).least_device_bytes == 0


def _seven_billion() -> list[ParameterSpec]:
    """In bfloat16: embedding and head, and 32 layers of which each has seven matrices."""
    width, inner = 4096, 11008
    sizes = [32000 * width]
    for _ in range(32):
        sizes += [width * width] * 4 + [width * inner] * 3
    sizes.append(32000 * width)
    return [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=numel,
            dtype=torch.bfloat16,
            trainable=True,
            always_on_host=False,
        )
        for index, numel in enumerate(sizes)
    ]


def test_what_lands_takes_what_reads_in_flight_need_and_state_has_the_rest() -> None:
    budget = Budget(host_bytes=50 * GIB, device_bytes=6 * GIB)
    placed = place(
        _seven_billion(), AdamRule(), budget, least_arena_bytes=GIB, separate_device=True
    )
    assert placed.arena_bytes <= 0.6 * GIB
    assert placed.inbox_bytes <= 64 << 20
    assert placed.host_bytes <= budget.host_bytes
    unused = budget.host_bytes - placed.host_bytes
    smallest = min(unit.numel * 12 for unit in placed.units_on_nvme)
    assert unused < smallest, "or more state could be at home in host memory"


def test_traffic_of_weights_falls_with_device_memory() -> None:
    read = []
    for device_bytes in (GIB, 6 * GIB, 14 * GIB):
        budget = Budget(host_bytes=20 * GIB, device_bytes=device_bytes)
        placed = place(
            _seven_billion(), AdamRule(), budget, least_arena_bytes=GIB, separate_device=True
        )
        read.append(traffic_of(placed).weights_read)
    assert read[0] > read[1] > read[2] == 0
