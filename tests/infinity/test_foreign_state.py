"""AdamW's state of other libraries goes on here, and ours there, as if it had never moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

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
from tests.support.training import nearest


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return Plain(tmp_path)


@pytest.mark.parametrize("place", [None, "optimizer", "optimizer_states"])
def test_state_dict_of_torch_goes_on(
    place: str | None, plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    state = plain.optimizer.state_dict()
    whole = {None: state, "optimizer": {place: state}, "optimizer_states": {place: [state]}}
    torch.save(whole[place], tmp_path / "optimizer.pt")
    run("import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights)
    assert_goes_on_as(plain, tmp_path / "ours", nvme)


def test_universal_checkpoint_of_deepspeed_goes_on_with_its_masters(
    plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    zero = tmp_path / "run" / "step3_universal" / "zero"
    for number, (name, p) in enumerate(plain.model.named_parameters()):
        folder = zero / name
        folder.mkdir(parents=True)
        state = plain.optimizer.state.get(p)
        saved = {"fp32": p.detach()} | ({} if not state else dict(state))
        for part, tensor in saved.items():
            flat = tensor.reshape(-1) if part != "step" else tensor
            torch.save(
                {"param": flat} if number % 2 and part != "step" else flat, folder / f"{part}.pt"
            )
    (tmp_path / "run" / "latest_universal").write_text("step3_universal")
    rounded = {key: value.bfloat16() for key, value in plain.model.state_dict().items()}
    save_file(rounded, tmp_path / "rounded.safetensors")
    model = tmp_path / "rounded.safetensors"
    run("import", tmp_path / "run", tmp_path / "ours", "--model", model)
    assert_goes_on_as(plain, tmp_path / "ours", nvme, **OPTIONS)


def test_state_comes_into_bfloat16_with_float32_masters(
    plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    torch.save(plain.optimizer.state_dict(), tmp_path / "optimizer.pt")
    run("import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights)
    model = Model()
    with infinity.offload(
        model, nvme, compute_dtype=torch.bfloat16, host_memory="256MiB"
    ) as offloaded:
        offloaded.load(tmp_path / "ours")
        offloaded.save(tmp_path / "saved")
    saved = checkpoint.load(tmp_path / "saved")
    name = "up.weight"
    assert torch.equal(
        saved["model"][name], nearest(plain.model.up.weight.detach(), torch.bfloat16)
    )
    kept = plain.optimizer.state[plain.model.up.weight]
    assert torch.equal(saved["optimizer"]["exp_avg"][name], kept["exp_avg"])
    master = (saved["model"][name].view(torch.int16).int() << 16) + saved["optimizer"]["lo"][name]
    assert torch.equal(master.view(torch.float32), plain.model.up.weight)


def test_our_moments_go_on_in_torch(nvme: Path, tmp_path: Path) -> None:
    model = seeded(Model)
    with infinity.offload(
        model, nvme, optimizer=infinity.AdamW(**OPTIONS), host_memory="256MiB"
    ) as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
        run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
        losses = train(model, offloaded.step, after(AT))
    plain = Plain(tmp_path)
    plain.model.load_state_dict(checkpoint.load(tmp_path / "ours", only=["model.*"])["model"])
    plain.optimizer.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
    assert plain.rest() == losses
    assert len(plain.optimizer.state_dict()["state"]) == 4
    assert not list(tmp_path.glob(".*"))


def test_exported_moments_come_back(plain: Plain, nvme: Path, tmp_path: Path) -> None:
    torch.save(plain.optimizer.state_dict(), tmp_path / "optimizer.pt")
    run("import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights)
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "again.pt")
    first, again = (
        torch.load(tmp_path / name, weights_only=True) for name in ("optimizer.pt", "again.pt")
    )
    assert first["param_groups"][0]["lr"] == again["param_groups"][0]["lr"]
    for number, kept in first["state"].items():
        assert all(torch.equal(value, again["state"][number][key]) for key, value in kept.items())


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adam])
def test_state_of_another_optimizer_is_refused(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain(tmp_path)
    other = kind(plain.model.named_parameters(), lr=1e-3, weight_decay=0.1)
    F.mse_loss(plain.model(torch.ones(2, WIDTH)), torch.ones(2, WIDTH)).backward()
    other.step()
    torch.save(other.state_dict(), tmp_path / "optimizer.pt")
    words = ["import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert "AdamW" in capsys.readouterr().err
    weights, state = get_state_dict(plain.model, other)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    words[1] = tmp_path / "dcp"
    assert main([str(word) for word in words]) == 1
    assert not (tmp_path / "ours").exists()


def test_imported_state_goes_on_with_the_optimizer_of_torch(
    plain: Plain, nvme: Path, tmp_path: Path
) -> None:
    torch.save(plain.optimizer.state_dict(), tmp_path / "optimizer.pt")
    run("import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights)
    model = Model()
    with infinity.offload(
        model,
        nvme,
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        host_memory="256MiB",
    ) as offloaded:
        offloaded.load(tmp_path / "ours")
        losses = train(model, offloaded.step, after(AT))
    assert losses == plain.rest()


class Attending(nn.Module):
    """Tiles of some parameters, which others come before, behind and between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 512)
        self.attention = nn.MultiheadAttention(512, 4, kdim=320)
        self.down = nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        mixed: torch.Tensor = self.down(self.attention(x, x[:, :320], x)[0])
        return mixed


def test_moments_of_tiles_are_exported_as_those_of_whole_parameters(
    nvme: Path, tmp_path: Path
) -> None:
    """By their numbers, too, which are by the order of parameters in the model."""
    saved = {}
    for tiles in (None, "256KiB"):
        model = seeded(Attending)
        with infinity.offload(
            model, nvme, host_memory="256MiB", max_parameter_bytes=tiles
        ) as offloaded:
            model(torch.ones(2, 512)).square().mean().backward()
            offloaded.step()
            offloaded.save(tmp_path / "ours")
        run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
        saved[tiles] = torch.load(tmp_path / "opt.pt", weights_only=True)
    whole, tiled = saved.values()
    names = [name for name, _ in Attending().named_parameters()]
    assert whole["param_groups"][0]["param_names"] == names
    assert tiled["param_groups"][0]["param_names"] == whole["param_groups"][0]["param_names"]
    assert tiled["state"].keys() == whole["state"].keys()
    for number, kept in whole["state"].items():
        assert all(v.shape == tiled["state"][number][k].shape for k, v in kept.items())
        torch.testing.assert_close(tiled["state"][number]["exp_avg"], kept["exp_avg"])


@pytest.mark.parametrize(
    "given",
    [
        lambda model: [p for part in reversed([*model.children()]) for p in part.parameters()],
        lambda model: [*model.parameters()][::-1],
        lambda model: sorted(model.parameters(), key=torch.Tensor.dim),
    ],
)
def test_numbers_of_parameters_in_tiles_are_those_that_a_factory_gave(
    given: Callable[[Any], Any], nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias, which is no tile, came before the weight that a head had first."""
    names = []
    for tiles in (None, "256KiB"):
        model = seeded(Attending)
        make = partial(_adamw_of, given, model)
        with infinity.offload(
            model, nvme, optimizer=make, host_memory="256MiB", max_parameter_bytes=tiles
        ) as offloaded:
            model(torch.ones(2, 512)).square().mean().backward()
            offloaded.step()
            offloaded.save(tmp_path / "ours")
        run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
        (group,) = torch.load(tmp_path / "opt.pt", weights_only=True)["param_groups"]
        names.append(group["param_names"])
        assert "of the order that param_names" in " ".join(capsys.readouterr().out.split())
    assert names[0] == names[1]


def _adamw_of(given: Callable[[Any], Any], model: nn.Module, _: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given(model))


def test_largest_second_moments_are_exported(nvme: Path, tmp_path: Path) -> None:
    def amsgrad(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, amsgrad=True)

    model = seeded(Model)
    with infinity.offload(model, nvme, optimizer=amsgrad, host_memory="256MiB") as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
    plain = torch.optim.AdamW(model.named_parameters(), amsgrad=True)
    plain.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
    saved = checkpoint.load(tmp_path / "ours")["optimizer"]
    for name, p in model.named_parameters():
        if p in plain.state:
            assert torch.equal(plain.state[p]["max_exp_avg_sq"], saved["max_exp_avg_sq"][name])
    assert len(plain.state) == 4


def test_numbered_parameters_need_the_order_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain(tmp_path, named=False)
    torch.save(plain.optimizer.state_dict(), tmp_path / "optimizer.pt")
    words = ["import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert "named_parameters()" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def _without_moments(state: dict[str, Any]) -> Any:
    for kept in state["state"].values():
        del kept["exp_avg_sq"]
    return state


def _of_another_shape(state: dict[str, Any]) -> Any:
    state["state"][0]["exp_avg"] = torch.zeros(3, 5)
    return state


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_without_moments, "not the state of AdamW"),
        (_of_another_shape, "exp_avg of up.weight has shape [3, 5], not [192, 96]"),
        (lambda state: {"epoch": 3}, "has no state dict of an optimizer"),
        (lambda state: Path, "without running what is in it"),
        (lambda state: {**state, "state": {}}, "has no exp_avg and exp_avg_sq of any parameter"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    spoil: Callable[[Any], Any],
    text: str,
    plain: Plain,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save(spoil(plain.optimizer.state_dict()), tmp_path / "optimizer.pt")
    words = ["import", tmp_path / "optimizer.pt", tmp_path / "ours", "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
