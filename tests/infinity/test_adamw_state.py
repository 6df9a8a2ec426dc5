"""The state of OffloadedAdamW goes out and in: state dicts, and files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import OffloadedAdamW
from infinity.adamw import state as offloaded_state
from tests.support.adamw_model import AMPLE, DTYPES, SMALL, make_model, same, train, values

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budgets", [(SMALL, AMPLE), (AMPLE, SMALL)])
def test_state_dict_goes_on_bit_identically_under_another_budget(
    dtype: torch.dtype, budgets: tuple[Any, Any], tmp_path: Path
) -> None:
    first, second = budgets
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=first) as optimizer:
        train(model, optimizer, range(3))
        weights = copy.deepcopy(model.state_dict())
        state = optimizer.state_dict()
        train(model, optimizer, range(3, 6))
        assert list(optimizer.state) == []
    expected = values(model)
    model = make_model(dtype)
    model.load_state_dict(weights)
    with OffloadedAdamW(model.parameters(), lr=9.0, nvme=tmp_path, host_memory=second) as optimizer:
        train(model, optimizer, range(8, 9))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(3, 6))
    assert same(values(model), expected)


def test_load_state_dict_takes_the_state_of_torch_adamw(tmp_path: Path) -> None:
    expected = make_model()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    train(expected, plain, range(3))
    model = make_model()
    model.load_state_dict(expected.state_dict())
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-2
        train(model, optimizer, range(3, 5))
        back = optimizer.state_dict()["state"]
    train(expected, plain, range(3, 5))
    for ours, theirs in zip(values(model), values(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [entry["step"] for entry in back.values()] == [5.0] * 6


def test_load_state_dict_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(2))
        before = optimizer.state_dict()
        wrong = copy.deepcopy(before)
        wrong["state"][2]["exp_avg"] = torch.zeros(3)
        wrong["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match=r"exp_avg of parameter 2 has shape \(3,\)"):
            optimizer.load_state_dict(wrong)
        amsgrad = copy.deepcopy(before)
        amsgrad["param_groups"][0]["amsgrad"] = True
        with pytest.raises(ValueError, match="amsgrad=True"):
            optimizer.load_state_dict(amsgrad)
        as_text = copy.deepcopy(before)
        as_text["state"] = {str(key): entry for key, entry in before["state"].items()}
        with pytest.raises(ValueError, match=r"state of '0', .*'4' and 1 others, which no"):
            optimizer.load_state_dict(as_text)
        fewer = copy.deepcopy(before)
        fewer["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="doesn't match the size"):
            optimizer.load_state_dict(fewer)
        after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], entry[name]) for name in entry)


def test_state_dict_beyond_the_free_memory_names_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(1))
        monkeypatch.setattr(offloaded_state, "available_bytes", lambda: 1000)
        with pytest.raises(MemoryError, match=r"optimizer\.save\(path\)"):
            optimizer.state_dict()


@pytest.mark.parametrize("dtype", DTYPES)
def test_save_and_load_go_on_bit_identically(dtype: torch.dtype, tmp_path: Path) -> None:
    nvme, path = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=nvme, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(3))
        optimizer.save(path, extra={"model": model.state_dict(), "epoch": 4})
        train(model, optimizer, range(3, 6))
    expected = values(model)
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), nvme=nvme, host_memory=7 << 20) as optimizer:
        train(model, optimizer, range(8, 9))
        extra = optimizer.load(path)
        model.load_state_dict(extra["model"])
        train(model, optimizer, range(3, 6))
    assert extra["epoch"] == 4
    assert same(values(model), expected)


def test_load_of_other_groups_or_parameters_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    nvme, path = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=nvme, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(2))
        optimizer.save(path)
    other = make_model(torch.bfloat16)
    with OffloadedAdamW(other.parameters(), nvme=nvme, host_memory=SMALL) as optimizer:
        train(other, optimizer, range(1))
        with pytest.raises(ValueError, match=r"dtype of parameter 0 is torch\.float32 in"):
            optimizer.load(path)
        assert [s["step"] for s in optimizer.state_dict()["state"].values()] == [1.0] * 6
    with (
        OffloadedAdamW(model[0].parameters(), nvme=nvme, host_memory=SMALL) as optimizer,
        pytest.raises(ValueError, match=r"parameter groups of \[6\] parameters, .* of \[2\]"),
    ):
        optimizer.load(path)
    with (
        OffloadedAdamW(model.parameters(), nvme=nvme, host_memory=SMALL) as optimizer,
        pytest.raises(FileNotFoundError),
    ):
        optimizer.load(tmp_path / "nowhere")
