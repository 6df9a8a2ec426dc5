"""OffloadedAdamW saves and loads by what its groups are when it does so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4)) for _ in range(count)]


def make(groups: Any, nvme: Path) -> OffloadedAdamW:
    return OffloadedAdamW(groups, nvme=nvme, host_memory="64MiB")


def step(optimizer: OffloadedAdamW, stepped: Sequence[nn.Parameter]) -> None:
    for number, parameter in enumerate(stepped):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()


def check_same(one: OffloadedAdamW, other: OffloadedAdamW) -> None:
    first, second = (optimizer.state_dict()["state"] for optimizer in (one, other))
    assert sorted(first) == sorted(second)
    for key, entries in first.items():
        assert all(torch.equal(second[key][name], entry) for name, entry in entries.items())


def test_load_with_equal_names_in_two_groups_gives_back_the_state_of_both(tmp_path: Path) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": nn.Linear(3, 3).named_parameters()} for _ in range(2)]

    with make(groups(), tmp_path) as saved, make(groups(), tmp_path) as loaded:
        step(saved, [p for group in saved.param_groups for p in group["params"]])
        saved.save(tmp_path / "s")
        loaded.load(tmp_path / "s")
        assert sorted(loaded.state_dict()["state"]) == [0, 1, 2, 3]
        check_same(saved, loaded)


@pytest.mark.parametrize("edit", ["append", "reverse", "remove", "replace"])
def test_load_of_groups_that_were_edited_gives_each_parameter_its_own_state(
    tmp_path: Path, edit: str
) -> None:
    first, later = parameters(3), parameters(1)
    with make([{"params": first[:2]}, {"params": first[2:]}], tmp_path) as saved:
        step(saved, first)
        params = saved.param_groups[0]["params"]
        if edit == "append":
            params.extend(later)
            step(saved, [*first, *later])
        elif edit == "reverse":
            params.reverse()
        elif edit == "remove":
            params.pop(0)
        else:
            params[0] = later[0]
            step(saved, [later[0], *first[1:]])
        saved.save(tmp_path / "s")
        with make([{"params": parameters(len(params))}, {"params": parameters(1)}], tmp_path) as q:
            q.load(tmp_path / "s")
            check_same(saved, q)
        before = saved.state_dict()
        saved.load(tmp_path / "s")
        after = saved.state_dict()
        for key, entries in before["state"].items():
            assert torch.equal(after["state"][key]["exp_avg"], entries["exp_avg"])


def test_load_of_state_that_no_group_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = parameters(2)
    with make(ours, tmp_path) as optimizer:
        step(optimizer, ours)
        members = optimizer._engine.members
        first, second = ours
        stranger = {"7": members.of(second), "0": members.of(first)}
        monkeypatch.setattr(members, "named", lambda _: stranger)
        optimizer.save(tmp_path / "s")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="has state of 7, which no parameter group"):
            optimizer.load(tmp_path / "s")
