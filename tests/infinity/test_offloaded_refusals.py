"""What OffloadedAdamW refuses changes nothing, and what it is given counts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
from infinity import OffloadedAdamW
from infinity.adamw import state as offloaded_state
from infinity.adamw.state import StateBytes
from swap.tiers import BudgetError
from tests.support.optimizer_state import ways_to_change_state


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


def test_state_has_that_of_a_parameter_and_is_not_changed_through(tmp_path: Path) -> None:
    with stepped(tmp_path) as optimizer:
        first = optimizer.param_groups[0]["params"][0]
        stranger = torch.zeros(4)
        assert first in optimizer.state
        assert stranger not in optimizer.state
        assert optimizer.state.get(stranger) is None
        entry = optimizer.state.get(first)
        assert entry is not None
        before = entry["exp_avg"].clone()
        for change in ways_to_change_state(optimizer):
            with pytest.raises(TypeError, match=r"optimizer\.load_state_dict"):
                change()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            optimizer.state[first]["exp_avg"].zero_()
        assert torch.equal(entry["exp_avg"], before)


def test_load_state_dict_without_state_begins_anew(tmp_path: Path) -> None:
    with stepped(tmp_path) as optimizer:
        optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})
        assert not optimizer.state
        assert optimizer.state_dict()["state"] == {}


def test_parameter_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="parameter 0 is several times"),
    ):
        make([parameter, parameter], tmp_path)
    with make([parameter], tmp_path) as optimizer:
        optimizer.param_groups[0]["params"].append(parameter)
        parameter.grad = torch.ones(4)
        with pytest.raises(ValueError, match="parameter 0 is several times"):
            optimizer.step()


def test_state_dict_of_adam_is_refused(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    adam = torch.optim.Adam(parameters, weight_decay=0.1)
    with stepped(tmp_path) as optimizer:
        with pytest.raises(ValueError, match="decoupled_weight_decay=False and the optimizer True"):
            optimizer.load_state_dict(adam.state_dict())
        optimizer.param_groups[0]["decoupled_weight_decay"] = False
        optimizer.load_state_dict(adam.state_dict())
        assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_forked_child_is_told_whose_files_the_state_is_in(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(1_000_000))
    with make([parameter], tmp_path, "10MiB") as optimizer:
        assert optimizer.report().nvme_bytes
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                optimizer.state_dict()
            except RuntimeError as error:
                os._exit(0 if "optimizer.save(path)" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert optimizer.state_dict()["state"][0]["step"] == 1.0


def test_failed_load_refuses_all_but_loading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(tmp_path) as optimizer:
        optimizer.save(tmp_path / "s", extra=7)
        before = optimizer.state_dict()

        def fails(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(StateBytes, "write", fails)
        with pytest.raises(OSError, match="Input/output"):
            optimizer.load(tmp_path / "s")
        monkeypatch.undo()
        for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="load again"):
                call()
        assert optimizer.load(tmp_path / "s") == 7
        after = optimizer.state_dict()
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], entry[name]) for name in entry)


def test_load_beside_a_save_takes_all_from_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with stepped(tmp_path) as writer, stepped(tmp_path) as optimizer:
        writer.save(path, extra=1)
        read = offloaded_state.read_header

        def saved_over(*arguments: Any) -> Any:
            header = read(*arguments)
            monkeypatch.setattr(offloaded_state, "read_header", read)
            writer.step()
            writer.param_groups[0]["lr"] = 0.25
            writer.save(path, extra=2)
            return header

        monkeypatch.setattr(offloaded_state, "read_header", saved_over)
        assert optimizer.load(path) == 2
        assert optimizer.param_groups[0]["lr"] == 0.25
        found, expected = optimizer.state_dict(), writer.state_dict()
    for key, entry in expected["state"].items():
        assert entry["step"] == 2.0
        assert all(torch.equal(found["state"][key][name], entry[name]) for name in entry)
