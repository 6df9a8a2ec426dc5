"""Arguments of wrong types and values, each refused by its name, in every public call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import OffloadedModel, TiledLinear
from tests.support.training import WHOLE

REFUSED = (TypeError, ValueError)
NOT_NUMBERS = (None, "x", [1.0], 1j, torch.ones(2), math.nan, 10**400)
NOT_AMOUNTS = (*NOT_NUMBERS, math.inf, -1.0)
NOT_COUNTS = (None, "2", 1.5, math.nan, [1], True, 0, -1)
NOT_FLAGS: tuple[Any, ...] = (None, 1, 0, "yes", [1])
NOT_SIZES = ("x", -1, 0, 1.5, True, [1], b"1")
NOT_PATHS = (3, b"x", ["a"], math.nan, "", "s3://bucket/run")
NOT_DEVICES: tuple[Any, ...] = ("tpu", "meta", "cpu:x", 3.5, [1], {})
NOT_BETAS = (None, 0.9, "ab", (0.9,), (0.9, None), (0.9, "x"), (math.nan, 0.9), (1.0, 0.9))
OPTIONS = {"lr": NOT_AMOUNTS, "eps": NOT_AMOUNTS, "weight_decay": NOT_AMOUNTS, "betas": NOT_BETAS}


def _refused(name: str, values: Any, call: Callable[[Any], Any]) -> None:
    for value in values:
        with pytest.raises(REFUSED, match=name) as raised:
            call(value)
        assert type(raised.value) in REFUSED, f"{name}={value!r}"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))


@pytest.mark.parametrize("name", [*OPTIONS, "state_dtype"])
def test_options_of_adamw_are_named(name: str) -> None:
    values = OPTIONS.get(name, (None, "float32", torch.int8))
    _refused(name, values, lambda value: infinity.AdamW(**{name: value}))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_offloaded_adamw_and_its_groups_are_named(name: str, nvme: Path) -> None:
    weights = [nn.Parameter(torch.ones(8))]

    def make(**options: Any) -> infinity.OffloadedAdamW:
        return infinity.OffloadedAdamW(weights, nvme=nvme, host_memory=WHOLE, **options)

    _refused(name, OPTIONS[name], lambda value: make(**{name: value}))
    optimizer = make()
    weights[0].grad = torch.ones(8)

    def step(value: Any) -> None:
        optimizer.param_groups[0][name] = value
        optimizer.step()

    _refused(name, OPTIONS[name], step)
    optimizer.close()
    assert torch.equal(weights[0], torch.ones(8))


@pytest.mark.parametrize("params", [None, 3, nn.Linear(2, 2)])
def test_params_of_offloaded_adamw_that_are_none_are_named(params: Any, nvme: Path) -> None:
    with pytest.raises(TypeError, match="params"):
        infinity.OffloadedAdamW(params, nvme=nvme)


BOTH: dict[str, tuple[Any, ...]] = {
    "nvme": (3, [], [3], [""], b"x", "", {"a": 1}),
    "host_memory": NOT_SIZES,
    "device_memory": NOT_SIZES,
    "device": NOT_DEVICES,
    "compute_dtype": ("bf16", 3, torch.int8, float),
    "optimizer": ("adamw", 3, infinity.AdamW, lambda _: None),
    "activations": (None, 3, "disk", True, ["keep"]),
    "max_parameter_bytes": NOT_SIZES,
}
OF_OFFLOAD = {
    "nvme": (None, *BOTH["nvme"]),
    "max_grad_norm": ("x", -1, 0, math.nan, True, [1], torch.tensor(1.0)),
    "weights": NOT_PATHS,
    "process_group": (3, "x"),
}
OF_PLAN: dict[str, tuple[Any, ...]] = {
    "world_size": (*NOT_COUNTS, 10**9, 10**400),
    "passes": (*NOT_COUNTS, 10**400),
    "compute_seconds": tuple(value for value in NOT_AMOUNTS if value is not None),
    "drive_endurance": (None, *NOT_SIZES),
}


@pytest.mark.parametrize("name", [*(BOTH | OF_OFFLOAD)])
def test_arguments_of_offload_are_named_and_the_model_is_as_it_was(name: str, nvme: Path) -> None:
    model = _model()
    before = [*model.parameters()]

    def enter(value: Any) -> None:
        options: dict[str, Any] = {"nvme": nvme, "host_memory": WHOLE, name: value}
        with infinity.offload(model, **options):
            pass

    _refused(name, (BOTH | OF_OFFLOAD)[name], enter)
    assert all(p is q and p.numel() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", [*(BOTH | OF_PLAN)])
def test_arguments_of_plan_are_named(name: str) -> None:
    values = (BOTH | OF_PLAN)[name]
    _refused(name, values, lambda value: infinity.plan(10**5, **{name: value}))


@pytest.mark.parametrize("count", [None, "7B", 1.5, 0, -1, True, [1]])
def test_what_is_no_model_for_a_plan_is_named(count: Any) -> None:
    with pytest.raises(REFUSED, match="parameters"):
        infinity.plan(count)


def _save_to(path: str, offloaded: OffloadedModel, second: Any) -> None:
    offloaded.save(path, second)


CALLS: dict[str, tuple[str, tuple[Any, ...], Callable[[OffloadedModel, Any], Any]]] = {
    "clip_grad_norm_": ("max_norm", (*NOT_NUMBERS, -1, -math.inf), OffloadedModel.clip_grad_norm_),
    "gradient": (
        "parameter",
        (None, "0.weight", 3, [1], nn.Linear(2, 2), torch.ones(3)),
        OffloadedModel.gradient,
    ),
    "gathered": (
        "param",
        ("0.weight", ["0.weight"], {"0.weight": 1}, 3, [None], [nn.Linear(2, 2)], torch.ones(3)),
        lambda offloaded, params: offloaded.gathered(params).__enter__(),
    ),
    "backward": ("loss", (None, 3, "x", [1]), OffloadedModel.backward),
    "save": ("path", NOT_PATHS, OffloadedModel.save),
    "load": ("path", NOT_PATHS, OffloadedModel.load),
    "export": ("folder", NOT_PATHS, OffloadedModel.export),
    "trace": ("path", NOT_PATHS, OffloadedModel.trace),
    "report": ("drive_endurance", (None, *NOT_SIZES), OffloadedModel.report),
    "save, stripe_dirs": (
        "stripe_dirs",
        ("x", 3, [3], [""]),
        lambda offloaded, value: offloaded.save("run", stripe_dirs=value),
    ),
    # The second argument of every other `save` is what to save.
    "save, block": ("extra=", ({"epoch": 3}, 7, 0, None, "x"), partial(_save_to, "run")),
    "save, only_trainable": (
        "only_trainable",
        NOT_FLAGS,
        lambda offloaded, value: offloaded.save("run", only_trainable=value),
    ),
    "snapshot, block": (
        "block",
        NOT_FLAGS,
        lambda offloaded, value: offloaded.snapshot("last", block=value),
    ),
    "gathered, modify": (
        "modify",
        (*NOT_FLAGS, nn.Parameter(torch.ones(3))),
        lambda offloaded, value: offloaded.gathered(None, value),
    ),
    "load, stripe_dirs": (
        "stripe_dirs",
        ("x", 3, [3], [""], {3: "x"}, {"x": 3}),
        lambda offloaded, value: offloaded.load("run", stripe_dirs=value),
    ),
}


def test_arguments_of_the_handle_are_named(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _model()
    with infinity.offload(model, nvme=nvme, host_memory=WHOLE) as offloaded:
        model(torch.ones(2, 64)).sum().backward()
        for name, values, call in CALLS.values():
            _refused(name, values, partial(call, offloaded))
        offloaded.step()
    assert [path for path in tmp_path.iterdir() if path != nvme] == []


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_group_are_named_and_the_step_can_be_taken_again(
    name: str, nvme: Path
) -> None:
    model = _model()
    with infinity.offload(model, nvme=nvme, host_memory=WHOLE) as offloaded:
        group = offloaded.optimizer.param_groups[0]
        before = group[name]
        model(torch.ones(2, 64)).sum().backward()

        def step(value: Any) -> None:
            group[name] = value
            offloaded.step()

        _refused(name, OPTIONS[name], step)
        step(before)
        assert offloaded.grad_norm > 0


def test_an_infinite_bound_of_the_norm_clips_nothing(nvme: Path) -> None:
    model = _model()
    with infinity.offload(model, nvme=nvme, host_memory=WHOLE) as offloaded:
        model(torch.ones(2, 64)).sum().backward()
        norm = offloaded.clip_grad_norm_(math.inf)
        assert torch.equal(offloaded.clip_grad_norm_(math.inf), norm)


@pytest.mark.parametrize("name", ["in_features", "out_features", "tiles"])
def test_sizes_of_a_tiled_linear_are_named(name: str) -> None:
    sizes = {"in_features": 4, "out_features": 4, "tiles": 2}
    values = (None, -1, "x", 1.5, True)
    _refused(name, values, lambda value: TiledLinear(**(sizes | {name: value})))
    _refused(
        "max_parameter_bytes",
        NOT_SIZES,
        lambda value: TiledLinear.from_linear(nn.Linear(8, 8), value),
    )
