"""OffloadedAdamW against itself in memory and against torch's AdamW, step by step."""

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import OffloadedAdamW
from tests.support import sharded_adamw
from tests.support.adamw_model import (
    AMPLE,
    DTYPES,
    SMALL,
    SMALL_BESIDE_OTHERS,
    backward,
    make_model,
    same,
    train,
    values,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_under_any_budget_gives_the_bits_of_adamw_in_memory(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model(dtype)
    with infinity.offload(
        model, tmp_path, optimizer=infinity.AdamW(lr=1e-2), host_memory=AMPLE
    ) as offloaded:
        for step in range(5):
            backward(model, step)
            offloaded.step()
        with offloaded.gathered():
            expected = values(model)
    for budget in (AMPLE, 7 << 20, SMALL):
        model = make_model(dtype)
        with OffloadedAdamW(
            model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=budget
        ) as optimizer:
            train(model, optimizer, range(5))
            report = optimizer.report()
        assert same(values(model), expected)
        assert report.host_bytes <= report.budget_host_bytes
        assert (report.nvme_bytes > 0) == (budget != AMPLE)
        assert (report.written_bytes > 0) == (budget != AMPLE)


def test_step_moves_less_than_all_state_because_slots_keep_what_they_held(tmp_path: Path) -> None:
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(4))
        before = optimizer.report()
        train(model, optimizer, range(4, 6))
        after = optimizer.report()
    assert 0 < after.read_bytes - before.read_bytes < 2 * after.nvme_bytes
    assert 0 < after.written_bytes - before.written_bytes < 2 * after.nvme_bytes


def test_two_directories_share_the_state(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model, expected = make_model(), make_model()
    with (
        OffloadedAdamW(model.parameters(), nvme=folders, host_memory=SMALL) as optimizer,
        OffloadedAdamW(expected.parameters(), nvme=folders[0], host_memory=AMPLE) as in_memory,
    ):
        train(model, optimizer, range(3))
        train(expected, in_memory, range(3))
        assert all(list(folder.rglob("*.swap")) for folder in folders)
    assert same(values(model), values(expected))
    with pytest.raises(ValueError, match="names a directory twice"):
        OffloadedAdamW(model.parameters(), nvme=[folders[0]] * 2, host_memory=SMALL)


def test_groups_and_schedulers_change_the_options_of_each_step(tmp_path: Path) -> None:
    results = []
    for budget in (AMPLE, SMALL):
        model = make_model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3},
        ]
        with OffloadedAdamW(groups, lr=1e-2, nvme=tmp_path, host_memory=budget) as optimizer:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
            for step in range(5):
                train(model, optimizer, range(step, step + 1))
                scheduler.step()
        results.append(values(model))
    assert same(*results)
    expected = make_model()
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in expected.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in expected.parameters() if p.dim() == 1], "lr": 1e-3},
        ],
        lr=1e-2,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(plain, 1e-2, total_steps=6)
    for step in range(5):
        train(expected, plain, range(step, step + 1))
        scheduler.step()
    for ours, theirs in zip(results[0], values(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_step_with_closure_returns_its_loss(tmp_path: Path) -> None:
    model = make_model()
    expected = backward(model, 0)
    model.zero_grad()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        loss = optimizer.step(lambda: backward(model, 0))
    assert loss == expected


def test_step_hooks_run_before_and_after(tmp_path: Path) -> None:
    model = make_model()
    seen: list[bool] = []
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        before = values(model)
        optimizer.register_step_pre_hook(lambda *_: seen.append(same(values(model), before)))
        optimizer.register_step_post_hook(lambda *_: seen.append(same(values(model), before)))
        train(model, optimizer, range(1))
    assert seen == [True, False]


def test_step_without_gradients_changes_nothing(tmp_path: Path) -> None:
    model = make_model()
    before = values(model)
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        optimizer.step()
        assert optimizer.report().steps == 0
    assert same(values(model), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_that_get_gradients_now_and_then_keep_their_own_step_counts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    results = []
    for budget in (AMPLE, SMALL):
        model = make_model(dtype)
        with OffloadedAdamW(
            model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=budget
        ) as optimizer:
            for step in range(6):
                backward(model, step)
                for position, parameter in enumerate(model.parameters()):
                    if (step + position) % 3 == 0:
                        parameter.grad = None
                optimizer.step()
                optimizer.zero_grad()
            steps = [entry["step"].item() for entry in optimizer.state_dict()["state"].values()]
        results.append(values(model))
    assert steps == [4.0] * 6
    assert same(*results)


def test_frozen_parameters_take_no_room_until_they_get_a_gradient(tmp_path: Path) -> None:
    results = []
    for budget in (AMPLE, SMALL_BESIDE_OTHERS):
        model = make_model()
        model[2].requires_grad_(False)
        with OffloadedAdamW(
            model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=budget
        ) as optimizer:
            before = values(model[2])
            host_bytes = optimizer.report().host_bytes + optimizer.report().nvme_bytes
            train(model, optimizer, range(2))
            assert same(values(model[2]), before)
            model[2].requires_grad_(True)
            train(model, optimizer, range(2, 5))
            report = optimizer.report()
            assert report.host_bytes + report.nvme_bytes >= host_bytes + 8 * before[0].numel()
            assert report.host_bytes <= report.budget_host_bytes
        results.append(values(model))
    assert same(*results)


def test_add_param_group_late_is_placed_in_what_is_left(tmp_path: Path) -> None:
    results = []
    for budget in (AMPLE, SMALL_BESIDE_OTHERS):
        model = make_model()
        with OffloadedAdamW(
            model[0].parameters(), lr=1e-2, nvme=tmp_path, host_memory=budget
        ) as optimizer:
            train(model, optimizer, range(2))
            model.zero_grad()
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
            optimizer.add_param_group({"params": list(model[4].parameters())})
            train(model, optimizer, range(2, 5))
            assert optimizer.report().host_bytes <= optimizer.report().budget_host_bytes
        results.append(values(model))
    assert same(*results)


def test_channels_last_parameters_are_updated_where_they_lie(tmp_path: Path) -> None:
    def make() -> nn.Conv2d:
        torch.manual_seed(1)
        model = nn.Conv2d(64, 96, 5)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    results = []
    for budget in (AMPLE, SMALL):
        model = make()
        with OffloadedAdamW(
            model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=budget
        ) as optimizer:
            for step in range(3):
                images = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(step))
                model(images).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.state_dict()["state"][0]
        assert state["exp_avg"].shape == (96, 64, 5, 5)
        results.append([*values(model), state["exp_avg"]])
    assert same(*results)
    expected = make()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for step in range(3):
        images = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(step))
        expected(images).square().mean().backward()
        plain.step()
        plain.zero_grad()
    moment = plain.state[expected.weight]["exp_avg"]
    torch.testing.assert_close(results[0][2], moment, rtol=1e-4, atol=1e-6)


def test_gradient_of_other_strides_is_taken(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(40, 30))
    expected = nn.Parameter(parameter.detach().clone())
    gradient = torch.randn(30, 40).t()
    parameter.grad, expected.grad = gradient, gradient.contiguous()
    with (
        OffloadedAdamW([parameter], nvme=tmp_path, host_memory=AMPLE) as first,
        OffloadedAdamW([expected], nvme=tmp_path, host_memory=AMPLE) as second,
    ):
        first.step()
        second.step()
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_changed_by_somebody_else_are_gone_on_from(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 5000).to(dtype))
    with OffloadedAdamW([parameter], lr=1e-4, nvme=tmp_path, host_memory=AMPLE) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():
            parameter[:10].fill_(3.0)
        kept = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    assert torch.equal(parameter, kept)


@pytest.mark.proof
def test_two_ranks_of_fsdp2_and_of_ddp_train_as_with_torch_adamw(tmp_path: Path) -> None:
    run_ranks(sharded_adamw.train_as_torch, tmp_path, 2)
    assert list((tmp_path / ".infinity").glob("*")) == []
