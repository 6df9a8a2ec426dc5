"""Sources of which a part is missing, damaged or of another optimizer: refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import checkpoint
from infinity.cli import main
from tests.support.foreign_runs import Plain, saved_by_torch

Kept = dict[str, Any]
Change = tuple[Callable[[str, Kept], Kept], str]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("plain"))


def _refusal(source: Path, plain: Plain, capsys: pytest.CaptureFixture[str]) -> str:
    target = source.with_name("ours")
    words = ["import", source, target, "--model", plain.weights]
    assert main([str(word) for word in words]) == 1
    assert not target.exists()
    return " ".join(capsys.readouterr().err.split())


def _states(plain: Plain, change: Callable[[str, Kept], Kept]) -> dict[str, Kept]:
    """What is kept of each parameter, changed."""
    named = {name: plain.optimizer.state.get(p) for name, p in plain.model.named_parameters()}
    return {name: change(name, dict(kept)) for name, kept in named.items() if kept}


def _without_a_moment(name: str, kept: Kept) -> Kept:
    if name == "up.weight":
        del kept["exp_avg"]
    return kept


def _of_two_optimizers(name: str, kept: Kept) -> Kept:
    is_matrix = kept["exp_avg"].dim() == 2
    return {"momentum_buffer": kept["exp_avg"]} if is_matrix else kept


def _in_float64(name: str, kept: Kept) -> Kept:
    return {key: value.double() for key, value in kept.items()}


def _after_infinite_steps(_: str, kept: Kept) -> Kept:
    return {**kept, "step": torch.tensor(float("inf"))}


def _sparse(_: str, kept: Kept) -> Kept:
    return {**kept, "exp_avg": kept["exp_avg"].to_sparse()}


def _without_values(_: str, kept: Kept) -> Kept:
    return {**kept, "exp_avg": kept["exp_avg"].to("meta")}


CHANGES: dict[str, Change] = {
    "a moment missing": (_without_a_moment, "keeps exp_avg_sq, step of up.weight, which is not"),
    "two optimizers": (_of_two_optimizers, "keeps momentum_buffer"),
    "steps that are no number": (_after_infinite_steps, "has no number of steps"),
    "moments that float32 rounds": (_in_float64, "in float64, and not in float32 or bfloat16"),
}


OF_FILES: dict[str, Change] = {
    "a sparse moment": (_sparse, "exp_avg.pt keeps a tensor as a sparse_coo tensor"),
    "a moment without values": (_without_values, "exp_avg.pt keeps a tensor on the meta device"),
}
"""Tensors that `torch.save` writes."""


@pytest.mark.parametrize("change", CHANGES | OF_FILES)
def test_a_universal_checkpoint_with_other_state_is_refused(
    change: str, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, text = (CHANGES | OF_FILES)[change]
    states = _states(plain, changed)
    for name, parameter in plain.model.named_parameters():
        folder = tmp_path / "universal" / "zero" / name
        folder.mkdir(parents=True)
        for part, tensor in {"fp32": parameter.detach(), **states.get(name, {})}.items():
            torch.save(tensor, folder / f"{part}.pt")
    assert text in _refusal(tmp_path / "universal", plain, capsys)


@pytest.mark.parametrize("change", CHANGES)
def test_a_distributed_checkpoint_with_other_state_is_refused(
    change: str, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, text = CHANGES[change]
    state = {"model": plain.model.state_dict(), "optim": {"state": _states(plain, changed)}}
    saved_by_torch(state, tmp_path / "dcp")
    assert text in _refusal(tmp_path / "dcp", plain, capsys)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "data missing": (lambda path: (path / "__0_0.distcp").unlink(), "cannot be read"),
    "data cut": (lambda path: os.truncate(path / "__0_0.distcp", 2000), "cannot be read"),
    "index empty": (lambda path: os.truncate(path / ".metadata", 0), ".metadata is no index"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_distributed_checkpoint_is_named(
    damage: str, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hurt, text = DAMAGE[damage]
    weights, state = get_state_dict(plain.model, plain.optimizer)
    saved_by_torch({"model": weights, "optim": state}, tmp_path / "dcp")
    hurt(tmp_path / "dcp")
    error = _refusal(tmp_path / "dcp", plain, capsys)
    assert text in error
    assert str(tmp_path / "dcp") in error


@pytest.mark.parametrize("state", [{"model": {"x": 1.5}}, {"infinity": 3}])
def test_export_of_an_optimizer_that_is_not_there_writes_nothing(
    state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(state | {"w": torch.ones(3)}, tmp_path / "c")
    words = ["export", tmp_path / "c", tmp_path / "out", "--optimizer", tmp_path / "o.pt"]
    assert main([str(word) for word in words]) == 1
    assert "leave --optimizer out" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_names_that_a_terminal_would_act_upon_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save({"a\nb": torch.ones(1), "\x1b[31mred": torch.ones(1)}, tmp_path / "c")
    for command in ("ls", "show"):
        assert main([command, str(tmp_path / "c")]) == 0
        shown = capsys.readouterr().out
        assert r"a\nb" in shown
        assert r"\x1b[31mred" in shown
        assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("state", None, "not those of a state dict"),
        ("param_groups", [3], "not those of a state dict"),
        ("param_groups", [{"lr": 0.1}], "not those of a state dict"),
        ("param_groups", [{"params": 3}], "not those of a state dict"),
        ("param_groups", [{"params": [[0]]}], "not those of a state dict"),
        ("param_groups", [{"params": [0], "param_names": None}], "not those of a state dict"),
        ("param_groups", [{"params": [0], "param_names": [3]}], "not those of a state dict"),
        ("param_groups", [{"params": [0], 7: 0.1}], "its options are 7"),
        ("state", {0: None}, "not those of a state dict"),
        ("exp_avg", torch.ones(3, device="meta"), "on the meta device, which has no values"),
        ("exp_avg_sq", torch.eye(3).to_sparse(), "as a sparse_coo tensor; save it dense"),
        ("step", torch.tensor(float("inf")), "no number of steps"),
        ("step", None, "no number of steps"),
    ],
)
def test_a_file_that_has_but_the_names_of_a_state_dict_is_refused(
    place: str,
    value: Any,
    text: str,
    plain: Plain,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = plain.optimizer.state_dict()
    if place in ("step", "exp_avg", "exp_avg_sq"):
        state["state"] = {key: {**kept, place: value} for key, kept in state["state"].items()}
    else:
        state[place] = value
    torch.save(state, tmp_path / "optimizer.pt")
    assert text in _refusal(tmp_path / "optimizer.pt", plain, capsys)
