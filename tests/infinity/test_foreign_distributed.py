"""AdamW's state in checkpoints of ``torch.distributed.checkpoint`` goes on here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import checkpoint
import infinity
from infinity.cli import main
from tests.support.foreign_runs import (
    AT,
    OPTIONS,
    WIDTH,
    Model,
    Plain,
    after,
    assert_goes_on_as,
    batches,
    run,
    saved_by_torch,
    train,
)
from tests.support.models import seeded
from tests.support.training import values_of


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return Plain(tmp_path)


PLACES = [
    ("model", "optim"),
    ("app.model", "app.optimizer"),
    ("state.model", "state.optim"),
    ("train.state", "train.optim"),
    ("state.model", "optim"),
]


@pytest.mark.parametrize("names", PLACES)
def test_distributed_checkpoint_goes_on(
    names: tuple[str, str], plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    weights, state = get_state_dict(plain.model, plain.optimizer)
    saved_by_torch(dict(zip(names, (weights, state), strict=True)), tmp_path / "dcp")
    save_file(Model().state_dict(), tmp_path / "others.safetensors")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", tmp_path / "others.safetensors")
    assert_goes_on_as(plain, tmp_path / "ours", nvme, **OPTIONS)


@pytest.mark.parametrize("is_flat", [False, True])
def test_groups_and_options_of_a_distributed_checkpoint_come_along(
    is_flat: bool, plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    model = plain.model
    groups = [
        {"params": [model.up.weight, model.down.weight], "weight_decay": 0.5},
        {"params": [model.up.bias, model.down.bias, *model.unused.parameters()], "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True, **OPTIONS)
    train(model, lambda: (optimizer.step(), optimizer.zero_grad()), batches())
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    found = checkpoint.load(tmp_path / "ours", only="infinity.*")["infinity"]["groups"]
    assert len(found) == 2
    for group, one in zip(optimizer.param_groups, found, strict=True):
        names = [
            name for name, p in model.named_parameters() if any(p is q for q in group["params"])
        ]
        assert sorted(one["params"]) == sorted(names)
        assert all(one[key] == value for key, value in group.items() if key != "params")


def test_flat_state_of_groups_with_equal_options_goes_on_in_these_groups(
    plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(plain.model, plain.optimizer, options=options)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    model = Model()
    parts = (model.up, model.down, model.unused)

    def in_groups(_: object) -> torch.optim.Optimizer:
        groups = [{"params": [*part.parameters()]} for part in parts]
        return torch.optim.AdamW(groups, lr=1e-4, fused=True)

    with infinity.offload(model, nvme, optimizer=in_groups, host_memory="256MiB") as offloaded:
        offloaded.load(tmp_path / "ours")
        groups = offloaded.optimizer.param_groups
        assert [group["lr"] for group in groups] == [OPTIONS["lr"]] * len(parts)
        assert train(model, offloaded.step, after(AT)) == plain.rest()


def test_a_source_without_options_says_so(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, state = get_state_dict(plain.model, plain.optimizer)
    saved_by_torch({"model": weights, "optim": {"state": state["state"]}}, tmp_path / "dcp")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    assert "names no options of the optimizer" in " ".join(capsys.readouterr().out.split())


def test_a_distributed_checkpoint_that_numbers_parameters_is_refused_with_what_names_them(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": plain.model.state_dict(), "optimizer": plain.optimizer.state_dict()}
    saved_by_torch(state, tmp_path / "dcp")
    words = ["import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert "get_state_dict(model, optimizer)" in " ".join(capsys.readouterr().err.split())


def test_parameters_of_another_name_are_refused(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, state = get_state_dict(plain.model, plain.optimizer)
    trees: list[Any] = [weights, state["state"]]
    for tree in trees:
        tree["renamed.weight"] = tree.pop("up.weight")
    saved_by_torch({"model": weights, "optim": {"state": state["state"]}}, tmp_path / "dcp")
    words = ["import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert "the model has no parameter renamed.weight" in capsys.readouterr().err


class Clashing(nn.Module):
    """Whose names are those of each other behind `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(8, 8)
        self.model = nn.Module()
        self.model.norm = nn.Linear(8, 8)


def test_names_that_begin_as_their_place_are_told_apart(tmp_path: Path) -> None:
    model = seeded(Clashing)
    optimizer = torch.optim.AdamW(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", tmp_path / "model.safetensors")
    ours = checkpoint.load(tmp_path / "ours")
    for name, p in model.named_parameters():
        assert torch.equal(ours["model"][name], p), name
        assert torch.equal(ours["optimizer"]["exp_avg"][name], optimizer.state[p]["exp_avg"])


def test_buffers_come_from_the_source_that_has_them(plain: Plain, tmp_path: Path) -> None:
    weights, state = get_state_dict(plain.model, plain.optimizer)
    scale = torch.full((WIDTH,), 0.25)
    weights["scale"] = scale
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    assert torch.equal(checkpoint.load(tmp_path / "ours")["model"]["scale"], scale)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([2**24 + 1, -(2**40) - 1]),
        torch.tensor([1 / 3, -1e-300], dtype=torch.float64),
        torch.tensor([1 + 2j, -3j]),
        torch.tensor([True, False]),
    ],
    ids=lambda values: str(values.dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("is_in_source", [True, False])
def test_buffers_of_all_dtypes_keep_their_values(
    is_in_source: bool, values: torch.Tensor, plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    plain.model.register_buffer("more", values)
    save_file(plain.model.state_dict(), plain.weights)
    if is_in_source:
        weights, state = get_state_dict(plain.model, plain.optimizer)
        saved_by_torch({"model": weights, "optim": state}, tmp_path / "source")
    else:
        torch.save(plain.optimizer.state_dict(), tmp_path / "source")
    run("import", tmp_path / "source", tmp_path / "ours", "--model", plain.weights)
    model = Model()
    model.register_buffer("more", torch.zeros_like(values))
    with infinity.offload(model, nvme, host_memory="256MiB") as offloaded:
        offloaded.load(tmp_path / "ours")
    assert torch.equal(model.get_buffer("more"), values)


@pytest.mark.parametrize(
    ("values", "here", "told"),
    [
        ([1 + 2j, -3j], [0.5, 0.25], "more was saved in torch.complex64 and is torch.float32"),
        ([1.5, 2.5], [0, 0], "more was saved in torch.float32 and is torch.int64"),
        ([1.5], [0.5, 0.25], r"more has shape \[1\] in the checkpoint, \[2\] in the model"),
        ([1.5, 2.5], [0.5], r"more has shape \[2\] in the checkpoint, \[1\] in the model"),
    ],
)
def test_imported_buffer_that_is_not_the_models_is_refused_before_anything_changes(
    values: list[Any], here: list[Any], told: str, plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    plain.model.register_buffer("more", torch.tensor(values))
    save_file(plain.model.state_dict(), plain.weights)
    weights, state = get_state_dict(plain.model, plain.optimizer)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    model = Model()
    model.register_buffer("more", torch.tensor(here))
    before = values_of(model)
    with (
        infinity.offload(model, nvme, host_memory="256MiB") as offloaded,
        pytest.raises(ValueError, match=told),
    ):
        offloaded.load(tmp_path / "ours")
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())


@pytest.mark.parametrize("frozen", [torch.bfloat16, torch.float64])
def test_frozen_weights_of_another_dtype_go_on_in_a_model_of_float32(
    frozen: torch.dtype, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Model)
    model.unused.requires_grad_(False).to(frozen)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    train(model, lambda: (optimizer.step(), optimizer.zero_grad()), batches())
    weights, state = get_state_dict(model, optimizer)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", tmp_path / "model.safetensors")
    ours = Model()
    ours.unused.requires_grad_(False)
    with infinity.offload(ours, nvme, host_memory="256MiB") as offloaded:
        offloaded.load(tmp_path / "ours")
    expected = model.float().state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in ours.state_dict().items())


def test_quantised_weights_of_files_are_kept_as_they_are(plain: Plain, tmp_path: Path) -> None:
    weights, state = get_state_dict(plain.model, plain.optimizer)
    del weights["scale"]
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    codes = plain.model.get_buffer("scale").to(torch.float8_e4m3fn)
    save_file({**plain.model.state_dict(), "scale": codes}, plain.weights)
    run("import", tmp_path / "dcp", tmp_path / "ours", "--model", plain.weights)
    assert checkpoint.load(tmp_path / "ours")["model"]["scale"].dtype == codes.dtype
