"""Options of torch's optimizers that are tensors, which schedules fill in place; and what else a
program keeps in a group.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.own_optimizers import linears, pass_back
from tests.support.training import WHOLE, least_budget, same_bits

WIDTH = 256
"""So that a layer is large enough to be on NVMe."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-2))


@pytest.mark.parametrize("budget", ["least", WHOLE])
def test_a_schedule_of_a_rate_that_is_a_tensor_has_the_bits_of_torch(
    budget: Any, nvme: Path
) -> None:
    plain = seeded(linears)
    optimizer = adam(plain.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(4):
        pass_back(plain, number)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    host_memory = least_budget(linears, nvme, optimizer=adam) if budget == "least" else budget
    model = seeded(linears)
    with infinity.offload(model, nvme, optimizer=adam, host_memory=host_memory) as offloaded:
        schedule = torch.optim.lr_scheduler.StepLR(offloaded.optimizer, 1, 0.5)
        for number in range(4):
            pass_back(model, number)
            offloaded.step()
            schedule.step()
    expected = plain.state_dict()
    assert all(same_bits(values, expected[name]) for name, values in model.state_dict().items())


def _snapshot(offloaded: infinity.OffloadedModel, _: Path) -> Callable[[], object]:
    offloaded.snapshot("begin")
    return partial(offloaded.restore, "begin")


def _saved(offloaded: infinity.OffloadedModel, folder: Path) -> Callable[[], object]:
    offloaded.save(folder / "saved")
    return partial(offloaded.load, folder / "saved")


@pytest.mark.parametrize("keep", [_snapshot, _saved])
def test_training_goes_on_from_before_a_schedule_filled_a_rate(
    keep: Callable[[infinity.OffloadedModel, Path], Callable[[], object]],
    nvme: Path,
    tmp_path: Path,
) -> None:
    model = seeded(linears)
    with infinity.offload(model, nvme, optimizer=adam, host_memory=WHOLE) as offloaded:
        bring_back, ends = keep(offloaded, tmp_path), []
        for _ in range(2):
            schedule = torch.optim.lr_scheduler.StepLR(offloaded.optimizer, 1, 0.5)
            for number in range(3):
                pass_back(model, number)
                offloaded.step()
                schedule.step()
            with offloaded.gathered():
                ends.append([parameter.detach().clone() for parameter in model.parameters()])
            bring_back()
        for snapshot in offloaded.snapshots():
            offloaded.drop_snapshot(snapshot.name)
    assert all(map(same_bits, *ends))


def test_defaults_that_are_changed_by_hand_are_refused_still(nvme: Path) -> None:
    model = seeded(linears)
    with infinity.offload(model, nvme, optimizer=adam, host_memory=WHOLE) as offloaded:
        pass_back(model, 0)
        offloaded.step()
        offloaded.optimizer.defaults["differentiable"] = True
        pass_back(model, 1)
        with pytest.raises(ValueError, match="defaults"):
            offloaded.step()
        offloaded.optimizer.defaults["differentiable"] = False
        offloaded.step()


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


def _trained(
    nvme: Path, change: Callable[[dict[str, Any], int], object]
) -> dict[str, torch.Tensor]:
    """By AdamW, with ``change`` made to its group before each backward pass: at the least budget,
    where updates begin before their steps.
    """
    model = seeded(_layers)
    with infinity.offload(model, nvme, host_memory=least_budget(_layers, nvme)) as offloaded:
        group = offloaded.optimizer.param_groups[0]
        for number in range(5):
            change(group, number)
            model(torch.full((2, WIDTH), 0.1 * number)).square().sum().backward()
            if isinstance(group["lr"], torch.Tensor):
                with pytest.raises(TypeError, match="is a Tensor, not a number"):
                    offloaded.step()
                group["lr"] = offloaded.optimizer.defaults["lr"]
            offloaded.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: np.ones(3),
        lambda: {"of mine": [torch.zeros(2)]},
        threading.Lock,
    ],
    ids=["tensor", "array", "tree", "lock"],
)
def test_what_a_program_keeps_in_a_group_of_adamw_changes_nothing(
    make: Callable[[], Any], nvme: Path
) -> None:
    expected = _trained(nvme, lambda group, number: None)
    found = _trained(nvme, lambda group, number: group.update(kept=make()))
    assert all(same_bits(values, expected[name]) for name, values in found.items())


def test_step_with_a_rate_that_was_refused_and_mended_has_the_same_bits(nvme: Path) -> None:
    """An update that had begun with the one that cannot be compared is not taken for the step."""

    def change(group: dict[str, Any], number: int) -> None:
        if number == 3:
            group["lr"] = torch.ones(2)

    expected = _trained(nvme, lambda group, number: None)
    found = _trained(nvme, change)
    assert all(same_bits(values, expected[name]) for name, values in found.items())
