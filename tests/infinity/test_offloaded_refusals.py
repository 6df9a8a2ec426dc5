"""What OffloadedAdamW refuses changes nothing, and what it is given counts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
from infinity import OffloadedAdamW
from swap.tiers import BudgetError


def make(parameters: list[nn.Parameter], nvme: Path, memory: str = "64MiB") -> OffloadedAdamW:
    return OffloadedAdamW(parameters, lr=1.0, nvme=nvme, host_memory=memory)


def stepped(nvme: Path) -> OffloadedAdamW:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    optimizer = make(parameters, nvme)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("step", torch.tensor(float("nan")), "step of parameter 1 is nan"),
        ("step", torch.ones(2), "step of parameter 1 is no number"),
        ("step", None, "step of parameter 1 is no number"),
        ("step", -1.0, "not a count"),
        ("exp_avg", torch.zeros(4, device="meta"), "meta device"),
        ("exp_avg", [1.0, 2.0, 3.0, 4.0], "is a list, not a tensor"),
        ("exp_avg", torch.zeros(4, dtype=torch.complex64), "complex64; float32"),
        ("exp_avg_sq", torch.ones(4).to_sparse(), "make it dense"),
    ],
)
def test_load_state_dict_of_values_that_are_no_state_changes_nothing(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    with stepped(tmp_path) as optimizer:
        before = optimizer.state_dict()
        wrong = copy.deepcopy(before)
        wrong["param_groups"][0]["lr"] = 7.0
        wrong["state"][0]["exp_avg"] *= 5
        wrong["state"][1][name] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
        after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], entry[name]) for name in entry)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("betas", (0.9,), "1 numbers; give 2"),
        ("lr", float("nan"), "lr=nan is not a number"),
        ("lr", None, "the options .*'lr': None"),
    ],
)
def test_load_state_dict_of_other_options_than_adamw_has_is_refused(
    option: str, value: Any, message: str, tmp_path: Path
) -> None:
    with stepped(tmp_path) as optimizer:
        wrong = optimizer.state_dict()
        wrong["param_groups"][0][option] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)


def test_load_state_dict_without_room_for_its_state_changes_nothing(tmp_path: Path) -> None:
    frozen = nn.Parameter(torch.zeros(3_000_000), requires_grad=False)
    with make([nn.Parameter(torch.zeros(4)), frozen], tmp_path, "5MiB") as optimizer:
        larger = optimizer.state_dict()
        larger["param_groups"][0]["lr"] = 7.0
        moments = torch.zeros(3_000_000)
        larger["state"] = {1: {"step": 1.0, "exp_avg": moments, "exp_avg_sq": moments}}
        with pytest.raises(BudgetError):
            optimizer.load_state_dict(larger)
        assert optimizer.param_groups[0]["lr"] == 1.0


def test_first_step_of_learning_rate_and_gradients_zero_counts(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    with make([parameter], tmp_path) as optimizer:
        optimizer.param_groups[0]["lr"] = 0.0
        parameter.grad = torch.zeros(4)
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 1.0


def test_load_of_a_checkpoint_of_another_kind_says_so(tmp_path: Path) -> None:
    checkpoint.save({"a": 1}, tmp_path / "s")
    with stepped(tmp_path) as optimizer, pytest.raises(ValueError, match="not saved by an Offl"):
        optimizer.load(tmp_path / "s")


def test_add_param_group_after_close_is_refused(tmp_path: Path) -> None:
    with stepped(tmp_path) as optimizer:
        pass
    with pytest.raises(RuntimeError, match="is closed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    assert len(optimizer.param_groups) == 1
