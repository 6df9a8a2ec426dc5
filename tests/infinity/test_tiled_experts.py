"""Experts of transformers, stacks of matrices, in tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.proof import matrix
from tests.support.training import (
    WHOLE,
    assert_same_runs,
    least_budget,
    same_values,
    train,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, INNER, EXPERTS = 192, 256, 12
BOUND = 3 << 18
"""Of three experts' first matrices; no other parameter is as large."""


class Layers(nn.Module):
    """Residual layers of experts, of which each row takes two; most get none."""

    def __init__(self, kind: str, depth: int = 3) -> None:
        super().__init__()
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = transformers.MixtralConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_local_experts=EXPERTS,
            experts_implementation=kind,
        )
        self.layers = nn.ModuleList(MixtralExperts(config) for _ in range(depth))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, :2].abs() * 50).long() % 5
        chosen[:, 1] = (chosen[:, 0] + 4) % EXPERTS
        for layer in self.layers:
            x = x + layer(x, chosen, x[:, 2:4].sigmoid())
        return x


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    result: torch.Tensor = model(torch.randn(9, WIDTH)).square().mean()
    return result


@pytest.mark.parametrize(
    ("dtype", "kind"),
    matrix(
        product([None, torch.bfloat16], ["eager", "grouped_mm"]),
        usual=[(torch.bfloat16, "grouped_mm")],
    ),
)
def test_experts_in_tiles_train_as_the_whole_under_every_budget(
    kind: str, dtype: torch.dtype | None, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that no row has chosen decay, as they do in memory."""
    make: Callable[[], nn.Module] = partial(Layers, kind)
    options: Any = {"compute_dtype": dtype}
    tiled = {**options, "max_parameter_bytes": BOUND if dtype is None else BOUND // 2}
    least = least_budget(make, nvme, **tiled)
    assert least < least_budget(make, nvme, **options) * 2 / 3
    with caplog.at_level(logging.WARNING):
        runs = {
            "plain": train(make, loss_of, nvme, host_memory=WHOLE, steps=3, **options),
            "least": train(make, loss_of, nvme, host_memory=least, steps=3, **tiled),
        }
    assert not any("tile" in record.message for record in caplog.records)
    first, *others = runs.values()
    for run in others:
        assert run.losses == first.losses
        assert same_values(run.values, first.values)
    runs["plain"] = train(make, loss_of, nvme, host_memory=WHOLE, steps=3, **tiled)
    assert_same_runs(runs)


def test_gradients_of_experts_are_those_of_the_whole(nvme: Path) -> None:
    for kind in ("grouped_mm", "eager"):
        model: Any = seeded(partial(Layers, kind))
        plain: Any = seeded(partial(Layers, kind))
        x = torch.randn(7, WIDTH)
        plain(x).square().sum().backward()
        with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as block:
            assert {n.rpartition(".")[2] for n, _ in model.named_parameters()} == {
                "gate_up_proj",
                "down_proj",
            }
            model(x).square().sum().backward()
            for ours, theirs in zip(model.layers, plain.layers, strict=True):
                for name in ("gate_up_proj", "down_proj"):
                    found = block.gradient(getattr(ours, name))
                    assert torch.equal(found, getattr(theirs, name).grad)  # type: ignore[arg-type]


def test_backward_within_autocast_gives_grouped_products_the_gradients_of_the_whole(
    nvme: Path,
) -> None:
    """Those are in float32: ``autocast`` leaves ``F.grouped_mm`` alone."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        loss: torch.Tensor = model(torch.randn(7, WIDTH, generator=generator)).square().sum()
        return loss

    model: Any = seeded(partial(Layers, "grouped_mm"))
    plain: Any = seeded(partial(Layers, "grouped_mm"))
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(plain).backward()
    with (
        infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as block,
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss_of(model).backward()
        for ours, theirs in zip(model.layers, plain.layers, strict=True):
            found = block.gradient(ours.gate_up_proj)
            assert found is not None
            assert torch.equal(found, theirs.gate_up_proj.grad)


@pytest.mark.parametrize("kind", ["grouped_mm", "eager"])
def test_penalties_of_gradients_through_experts_train_as_without_tiles(
    kind: str, nvme: Path
) -> None:
    def penalised(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(7, WIDTH, requires_grad=True)
        loss = model(x).square().sum()
        slopes = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        return sum((slope.square().sum() for slope in slopes), loss)

    runs = [
        train(partial(Layers, kind), penalised, nvme, host_memory=WHOLE, steps=1, **options)
        for options in ({}, {"max_parameter_bytes": BOUND})
    ]
    assert same_values(runs[0].values, runs[1].values)


def test_recomputed_layers_of_experts_give_the_same(nvme: Path) -> None:
    class Recomputing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = super().forward
            return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)

    runs = {}
    for kind in (Layers, Recomputing):
        make = partial(kind, "eager")
        least = least_budget(make, nvme, max_parameter_bytes=BOUND)
        runs[kind.__name__] = train(
            make, loss_of, nvme, host_memory=least, steps=2, max_parameter_bytes=BOUND
        )
    assert_same_runs(runs)


def test_checkpoints_and_state_dicts_have_whole_stacks(nvme: Path, tmp_path: Path) -> None:
    model = seeded(partial(Layers, "grouped_mm"))
    names = list(model.state_dict())
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        loss_of(model, 0).backward()
        offloaded.step()
        offloaded.save(tmp_path / "saved")
        with offloaded.gathered():
            assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    other = Layers("eager")
    with infinity.offload(other, nvme, host_memory=WHOLE) as offloaded:
        offloaded.load(tmp_path / "saved")
    assert same_values(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["batched_mm"])
def test_experts_that_are_copied_for_each_row_stay_whole(
    kind: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Layers(kind, 1)
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND),
    ):
        loss_of(model, 0).backward()
    assert "a MixtralExperts with experts_implementation='batched_mm'" in caplog.text
