"""Options of torch's optimizers that are tensors, which schedules fill in place."""

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import seeded
from tests.support.own_optimizers import linears, pass_back
from tests.support.training import WHOLE, least_budget, same_bits


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
