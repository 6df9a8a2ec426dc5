"""What OffloadedAdamW refuses: budgets, parameters, options, gradients, models moved under it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import OffloadedAdamW, arguments
from infinity.arguments import budget_of_rank
from tests.support.adamw_model import (
    AMPLE,
    SMALL,
    backward,
    batch,
    files_in,
    make_model,
    same,
    train,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
        (torch.eye(4).to_sparse(), "is torch.sparse_coo, .* make it dense"),
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


def test_model_laid_out_anew_under_the_optimizer_is_told_what_differs(tmp_path: Path) -> None:
    model = nn.Conv2d(4, 8, 3)
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=AMPLE) as optimizer:
        # What model.to(memory_format=torch.channels_last) does.
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        model(torch.ones(1, 4, 8, 8)).sum().backward()
        with pytest.raises(RuntimeError, match=r"order \(0, 2, 3, 1\), now.*another memory_format"):
            optimizer.step()


def test_ranks_of_a_job_share_the_free_memory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "available_bytes", lambda: 64 << 30)
    assert budget_of_rank(None) == 32 << 30
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert budget_of_rank(None) == 4 << 30
    assert budget_of_rank("1GiB") == 1 << 30


def test_copying_or_pickling_names_save(tmp_path: Path) -> None:
    model = make_model()
    with (
        OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer,
        pytest.raises(TypeError, match=r"optimizer\.save"),
    ):
        copy.deepcopy(optimizer)
