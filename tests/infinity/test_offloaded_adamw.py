"""OffloadedAdamW against itself in memory, against torch's AdamW, and against faults."""

import copy
import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from aio import AioError, Engine
from aio.backends import MemoryBackend
from infinity import OffloadedAdamW, arguments
from infinity.adamw import state as offloaded_state
from infinity.adamw.tiers import store as state_store
from infinity.arguments import budget_of_rank

AMPLE = "1GiB"
SMALL = 7_100_000
"""Bytes that leave most of the state of ``make_model`` on NVMe."""
SMALL_BESIDE_OTHERS = 7_400_000
"""Bytes that leave room for slots beside the state of the small layers at home."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(150, 700), nn.GELU(), nn.Linear(700, 901), nn.GELU(), nn.Linear(901, 3)
    ).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 150, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model: nn.Module, step: int) -> float:
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(batch(step, dtype)).float().square().mean()
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models compute faster so, when tests share a machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the engines of later optimizers fail with that probability a block."""

    def install(error: float) -> None:
        backend = MemoryBackend(seed=7, error=error, errno=errno.EIO, short_transfer=0.1)
        monkeypatch.setattr(state_store, "Engine", partial(Engine, backend))

    return install


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


def test_add_param_group_without_room_is_refused_and_undone(tmp_path: Path) -> None:
    small = nn.Linear(8, 8)
    with OffloadedAdamW(small.parameters(), nvme=tmp_path, host_memory=5 << 20) as optimizer:
        with pytest.raises(infinity.BudgetError, match=r"host_memory=5\.00 MiB is too small"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1 << 20))]})
        assert len(optimizer.param_groups) == 1
        small(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def test_budget_below_the_least_is_refused_and_the_least_works(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(infinity.BudgetError) as refused:
        OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=1 << 20)
    least = refused.value.least_host_bytes
    assert f"({least} bytes)" in str(refused.value)
    with pytest.raises(infinity.BudgetError):
        OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=least - 1)
    assert files_in(tmp_path) == []
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=least) as optimizer:
        train(model, optimizer, range(2))
        assert optimizer.report().host_bytes == least


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(4, dtype=torch.float64), "is torch.float64; OffloadedAdamW updates"),
        (torch.zeros(4, device="meta"), "is on the meta device"),
        (torch.zeros(8)[::2], "is not dense in memory"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused(
    parameter: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadedAdamW([parameter.requires_grad_()], nvme=tmp_path, host_memory=AMPLE)


@pytest.mark.parametrize(
    ("option", "message"), [({"lr": -1.0}, "lr=-1.0"), ({"betas": (0.9, 1.0)}, "betas")]
)
def test_options_out_of_range_are_refused(
    option: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=message):
        OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=AMPLE, **option)
    before = values(model)
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=AMPLE) as optimizer:
        optimizer.param_groups[0].update(option)
        backward(model, 0)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    assert same(values(model), before)


def test_sparse_gradient_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = make_model()
    table = nn.Embedding(10, 4, sparse=True)
    before = values(model)
    parameters = [*model.parameters(), *table.parameters()]
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=SMALL) as optimizer:
        backward(model, 0)
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse gradient"):
            optimizer.step()
        assert same(values(model), before)
        table.zero_grad()
        optimizer.step()
    assert not same(values(model), before)


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


def test_backward_of_a_graph_from_before_the_step_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        loss = model(batch(1)).sum()
        train(model, optimizer, range(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_model_moved_or_converted_under_the_optimizer_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=AMPLE) as optimizer:
        model.to(torch.bfloat16)
        backward(model, 0)
        with pytest.raises(RuntimeError, match="convert and move a model before"):
            optimizer.step()


# State out and in.


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


def test_ranks_of_a_job_share_the_free_memory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "available_bytes", lambda: 64 << 30)
    assert budget_of_rank(None) == 32 << 30
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert budget_of_rank(None) == 4 << 30
    assert budget_of_rank("1GiB") == 1 << 30


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


def test_copying_or_pickling_names_save(tmp_path: Path) -> None:
    model = make_model()
    with (
        OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer,
        pytest.raises(TypeError, match=r"optimizer\.save"),
    ):
        copy.deepcopy(optimizer)


# Faults.


@pytest.mark.parametrize("dtype", DTYPES)
def test_io_errors_are_raised_and_flush_finishes_the_step_exactly(
    dtype: torch.dtype, tmp_path: Path, faulty: Callable[[float], None]
) -> None:
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=AMPLE) as optimizer:
        train(model, optimizer, range(6))
    expected = values(model)
    faulty(0.2)
    failures = 0
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=SMALL) as optimizer:
        for step in range(6):
            backward(model, step)
            if not take_step(optimizer):
                with pytest.raises(RuntimeError, match=r"optimizer\.flush\(\)"):
                    optimizer.step()
                failures += finish(optimizer)
            optimizer.zero_grad()
    assert failures > 3
    assert same(values(model), expected)


def take_step(optimizer: OffloadedAdamW) -> bool:
    """Whether the step was not stopped by an error."""
    try:
        optimizer.step()
    except AioError:
        return False
    return True


def finish(optimizer: OffloadedAdamW) -> int:
    """Flush until it succeeds; returns how often it was tried."""
    for tries in range(1, 1000):
        try:
            optimizer.flush()
        except AioError:
            continue
        return tries
    raise AssertionError("flush never succeeded")


def test_gradient_zeroed_in_place_before_a_stopped_step_is_finished_is_refused(
    tmp_path: Path, faulty: Callable[[float], None]
) -> None:
    faulty(1.0)
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        backward(model, 0)
        with pytest.raises(AioError):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            optimizer.flush()


def test_full_disk_is_an_error_when_the_optimizer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise AioError("no space", errno=errno.ENOSPC, filename=os.fspath(tmp_path))

    monkeypatch.setattr("swap.storage.extents.ExtentStore.reserve", full)
    with pytest.raises(AioError, match="no space"):
        OffloadedAdamW(make_model().parameters(), nvme=tmp_path, host_memory=SMALL)
    assert files_in(tmp_path) == []


# Cleaning up.


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[OffloadedAdamW]]:
    model = make_model()
    optimizers = [OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL)]
    train(model, optimizers[0], range(1))
    assert files_in(tmp_path) != []
    yield optimizers
    assert files_in(tmp_path) == []


def test_close_leaves_no_file_and_refuses_further_use(opened: list[OffloadedAdamW]) -> None:
    (optimizer,) = opened
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_collected_optimizer_leaves_no_file(opened: list[OffloadedAdamW]) -> None:
    opened.clear()
    gc.collect()


def test_exception_in_the_block_leaves_no_file(opened: list[OffloadedAdamW]) -> None:
    with pytest.raises(KeyError), opened[0]:
        raise KeyError


def test_fork_leaves_the_files_of_the_parent(opened: list[OffloadedAdamW], tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        opened[0].close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert files_in(tmp_path) != []
    opened[0].close()


def test_interpreter_exit_without_close_leaves_no_file(tmp_path: Path) -> None:
    program = """
import sys, torch, infinity
model = torch.nn.Linear(1000, 1000)
optimizer = infinity.OffloadedAdamW(model.parameters(), nvme=sys.argv[1], host_memory="7MiB")
model(torch.ones(1, 1000)).sum().backward()
optimizer.step()
assert optimizer.report().nvme_bytes
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, os.fspath(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert files_in(tmp_path) == []


@pytest.mark.proof
def test_two_ranks_of_fsdp2_and_of_ddp_train_as_with_torch_adamw(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.sharded_adamw", str(rank), os.fspath(tmp_path)],
            cwd=root,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert list((tmp_path / ".infinity").glob("*")) == []
