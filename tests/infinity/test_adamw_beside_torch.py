"""OffloadedAdamW beside torch.optim.AdamW(fused=True), bit for bit, with torch's state dicts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import infinity
from checkpoint.dcp import StorageReader, StorageWriter
from infinity import OffloadedAdamW
from tests.support import recipe_adamw
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

MEMORY = 6_600_000
Make = Callable[[nn.Module], torch.optim.Optimizer]


# Sizes are whole vectors: torch's fused kernel rounds what is left over otherwise.
def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(dtype)


def groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, **options}, {"params": biases, "lr": 0.03, "weight_decay": 0.0}]


def torch_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model, **options), lr=1e-2, fused=True)


def offloaded_adamw(model: nn.Module, folder: Path, **options: Any) -> OffloadedAdamW:
    return OffloadedAdamW(groups(model, **options), lr=1e-2, nvme=folder, host_memory=MEMORY)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        data = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
def test_steps_give_the_bits_of_fused_adamw(tmp_path: Path, options: dict[str, Any]) -> None:
    expected, model = make_model(), make_model()
    train(expected, torch_adamw(expected, **options), 0, 5)
    with offloaded_adamw(model, tmp_path, **options) as optimizer:
        train(model, optimizer, 0, 5)
    assert_equal(model, expected)


def test_steps_without_decoupled_decay_are_those_of_adam(tmp_path: Path) -> None:
    expected, model = make_model(), make_model()
    train(expected, torch.optim.Adam(groups(expected), 1e-2, weight_decay=0.1, fused=True), 0, 5)
    with OffloadedAdamW(
        groups(model, decoupled_weight_decay=False),
        lr=1e-2,
        weight_decay=0.1,
        nvme=tmp_path,
        host_memory=MEMORY,
    ) as optimizer:
        train(model, optimizer, 0, 5)
    assert_equal(model, expected)


def test_a_learning_rate_in_a_tensor_is_read_there_at_each_step(tmp_path: Path) -> None:
    expected, model = make_model(), make_model()
    plain_rate, rate = torch.tensor(1e-2), torch.tensor(1e-2)
    plain = torch.optim.AdamW(expected.parameters(), lr=plain_rate, fused=True)
    with OffloadedAdamW(
        model.parameters(), lr=rate, nvme=tmp_path, host_memory=MEMORY
    ) as optimizer:
        for step in range(4):
            plain_rate.fill_(0.1 / (step + 1))
            rate.fill_(0.1 / (step + 1))
            train(expected, plain, step, step + 1)
            train(model, optimizer, step, step + 1)
            assert_equal(model, expected)


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_that_are_not_computed_are_refused_wherever_they_come_from(
    tmp_path: Path, option: str
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=f"{option}=True in a parameter group"):
        offloaded_adamw(model, tmp_path, **{option: True})
    assert list(tmp_path.rglob("*.lock")) == []
    with offloaded_adamw(model, tmp_path) as optimizer:
        extra = nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match=f"{option}=True"):
            optimizer.add_param_group({"params": [extra], option: True})
        assert len(optimizer.param_groups) == 2
        train(model, optimizer, 0, 1)
        state = optimizer.state_dict()
        state["param_groups"][1][option] = True
        with pytest.raises(ValueError, match=f"{option}=True"):
            optimizer.load_state_dict(state)
        optimizer.param_groups[0][option] = True
        before = copy.deepcopy(model)
        with pytest.raises(ValueError, match=f"{option}=True"):
            train(model, optimizer, 1, 2)
        assert_equal(model, before)


def test_groups_of_another_optimizer_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = make_model()
    other = torch.optim.SGD(groups(model), lr=0.5)
    with offloaded_adamw(model, tmp_path) as optimizer:
        with pytest.raises(ValueError, match="has no betas and no eps"):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-2


def test_hooks_change_the_state_that_is_loaded(tmp_path: Path) -> None:
    model = make_model()

    def forget(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"].zero_()
        return state_dict

    with offloaded_adamw(model, tmp_path) as optimizer:
        train(model, optimizer, 0, 1)
        optimizer.register_load_state_dict_pre_hook(forget)
        for _ in range(2):
            optimizer.load_state_dict(optimizer.state_dict())
            state = optimizer.state_dict()["state"]
            assert not state[0]["exp_avg"].any()
            assert state[1]["exp_avg"].any()


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_offload_refuses_options_that_are_not_computed(tmp_path: Path, option: str) -> None:
    model = make_model()
    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW()) as offloaded:
        offloaded.optimizer.param_groups[0][option] = True
        model(torch.ones(1, 32)).sum().backward()
        with pytest.raises(ValueError, match=f"{option}=True in a parameter group"):
            offloaded.step()


def test_offload_takes_maximize(tmp_path: Path) -> None:
    expected, model = make_model(), make_model()
    train(expected, torch.optim.AdamW(expected.parameters(), maximize=True, fused=True), 0, 4)
    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW()) as offloaded:
        offloaded.optimizer.param_groups[0]["maximize"] = True
        train(model, offloaded.optimizer, 0, 4)
    assert_equal(model, expected)


# torch.distributed.checkpoint.state_dict.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_asking_for_the_state_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    asked, left = make_model(dtype), make_model(dtype)
    with offloaded_adamw(asked, tmp_path) as first, offloaded_adamw(left, tmp_path) as second:
        for step in range(4):
            state: Any = get_optimizer_state_dict(asked, first)["state"]
            assert {entry["step"].item() for entry in state.values()} == {float(step)}
            assert len(state) == 4
            train(asked, first, step, step + 1)
            train(left, second, step, step + 1)
            assert_equal(asked, left)


def test_state_lists_nothing_is_read_by_parameter_and_takes_nothing(tmp_path: Path) -> None:
    model = make_model()
    with offloaded_adamw(model, tmp_path) as optimizer:
        assert not optimizer.state
        train(model, optimizer, 0, 2)
        assert optimizer.state
        assert list(optimizer.state) == []
        saved = optimizer.state_dict()["state"]
        weight = optimizer.param_groups[0]["params"][0]
        assert list(optimizer.state[weight]) == ["step", "exp_avg", "exp_avg_sq"]
        assert torch.equal(optimizer.state[weight]["exp_avg"], saved[0]["exp_avg"])
        assert "master" not in optimizer.state[weight]
        with pytest.raises(TypeError, match=r"optimizer\.load_state_dict"):
            optimizer.state[weight] = {}


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["nested", "flat", "full"])
@pytest.mark.parametrize(("save_ours", "load_ours"), [(True, True), (True, False), (False, True)])
def test_the_recipe_of_the_tutorial_goes_on_with_the_bits_of_fused_adamw(
    tmp_path: Path, options: StateDictOptions, save_ours: bool, load_ours: bool
) -> None:
    def make(model: nn.Module, ours: bool) -> torch.optim.Optimizer:
        return offloaded_adamw(model, tmp_path) if ours else torch_adamw(model)

    expected = make_model()
    plain = torch_adamw(expected)
    train(expected, plain, 0, 6)

    model = make_model()
    optimizer = make(model, save_ours)
    train(model, optimizer, 0, 3)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp_save({"model": weights, "optim": state}, storage_writer=StorageWriter(tmp_path / "s"))
    train(model, optimizer, 3, 6)
    assert_equal(model, expected)

    other = make_model()
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 0, 1)
    second = make(other, load_ours)
    weights, state = get_state_dict(other, second, options=options)
    live: Any = {"model": weights, "optim": state}
    dcp_load(live, storage_reader=StorageReader(tmp_path / "s"))
    set_state_dict(
        other,
        second,
        model_state_dict=live["model"],
        optim_state_dict=live["optim"],
        options=options,
    )
    for group in second.param_groups:
        group["fused"] = None if load_ours else True
    train(other, second, 3, 6)
    assert_equal(other, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_16_bit_masters_are_kept_in_whatever_order_states_are_loaded(
    tmp_path: Path, dtype: torch.dtype, optimizer_first: bool
) -> None:
    model = make_model(dtype)
    with offloaded_adamw(model, tmp_path) as optimizer:
        train(model, optimizer, 0, 5)
        weights = copy.deepcopy(model.state_dict())
        state = get_optimizer_state_dict(model, optimizer)
        plain = optimizer.state_dict()
        train(model, optimizer, 5, 9)
    for by_torch in (True, False):
        other = make_model(dtype)
        with offloaded_adamw(other, tmp_path) as optimizer:
            if not optimizer_first:
                other.load_state_dict(weights)
            if by_torch:
                set_optimizer_state_dict(other, optimizer, copy.deepcopy(state))
            else:
                optimizer.load_state_dict(plain)
            other.load_state_dict(weights)
            train(other, optimizer, 5, 9)
        assert_equal(other, model)


def test_asking_an_offloaded_model_for_its_optimizer_state_takes_no_step(tmp_path: Path) -> None:
    model = make_model()
    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW()) as offloaded:
        train(model, offloaded.optimizer, 0, 1)
        with pytest.raises(RuntimeError, match=r"offloaded\.save"):
            get_optimizer_state_dict(model, offloaded.optimizer)
        assert max(offloaded._training.steps) == 1


def test_two_ranks_of_fsdp2_save_and_load_with_the_bits_of_fused_adamw(tmp_path: Path) -> None:
    run_ranks(recipe_adamw.save_and_load, tmp_path, 2)
