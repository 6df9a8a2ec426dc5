"""Packed projections of ``nn.MultiheadAttention`` in tiles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.records import records_of
from infinity.tiling.layers import Tiling
from tests.support.models import seeded
from tests.support.training import WHOLE, assert_same_runs, least_budget, same_values, train

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BOUND = 320, 1 << 18


def attention(**options: Any) -> Any:
    return nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(step))
    result: torch.Tensor = model(x).square().mean()
    return result


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 640, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def test_encoder_in_tiles_trains_under_every_budget_as_in_memory(
    nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    least = least_budget(encoder, nvme, max_parameter_bytes=BOUND)
    assert least < least_budget(encoder, nvme)
    with caplog.at_level(logging.WARNING):
        runs = {
            name: train(
                encoder, loss_of, nvme, host_memory=budget, steps=3, max_parameter_bytes=BOUND
            )
            for name, budget in (("whole", WHOLE), ("least", least))
        }
    assert_same_runs(runs)
    assert not caplog.records
    plain = train(encoder, loss_of, nvme, host_memory=WHOLE, steps=3)
    assert torch.tensor(plain.losses).allclose(torch.tensor(runs["least"].losses))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 256, "vdim": 288}], ids=str)
@pytest.mark.parametrize("kinds", ["q is k is v", "k is v", "all different"])
def test_attention_in_tiles_gives_what_the_whole_gives(kinds: str, options: Any) -> None:
    q, k, v = (torch.randn(2, n, WIDTH) for n in (3, 5, 5))
    if kinds != "all different" or options.get("kdim"):
        v = k
    if kinds == "q is k is v":
        q = k
    if "kdim" in options:
        k, v = k[..., : options["kdim"]], k[..., : options["vdim"]]
    model = nn.ModuleList([seeded(lambda: attention(**options))])
    expected, weights = model[0](q, k, v)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model[0].named_parameters()}
    model.zero_grad()
    with Tiling(model, records_of(model, None), BOUND, None):
        assert max(p.nbytes for p in model.parameters()) <= BOUND
        found, found_weights = model[0](q, k, v)
        assert found.allclose(expected, atol=1e-6)
        assert found_weights.allclose(weights, atol=1e-6)
        found.square().sum().backward()
        for name, gradient in gradients.items():
            owner, _, own = name.rpartition(".")
            ours = getattr(model[0].get_submodule(owner), own).grad
            assert ours.allclose(gradient, atol=1e-4)
        model.zero_grad()


def test_checkpoints_know_nothing_of_tiles_of_projections(nvme: Path, tmp_path: Path) -> None:
    model = seeded(encoder)
    names = list(model.state_dict())
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        loss_of(model, 0).backward()
        offloaded.step()
        offloaded.save(tmp_path / "saved")
        with offloaded.gathered():
            assert {*model.state_dict()} == {*names}
    assert list(model.state_dict()) == names
    other = seeded(encoder, 1)
    with infinity.offload(other, nvme, host_memory=WHOLE) as offloaded:
        offloaded.load(tmp_path / "saved")
    assert same_values(other.state_dict(), model.state_dict())


def test_evaluation_in_tiles_is_that_of_the_whole(nvme: Path) -> None:
    model = seeded(encoder).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        expected = model(x)
        with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
            assert model(x).allclose(expected, atol=1e-5)


@torch.no_grad()
def test_parts_of_a_weight_keep_its_memory_where_other_data_is_assigned(nvme: Path) -> None:
    model = nn.MultiheadAttention(256, 4)
    before = model.in_proj_weight.clone()
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=1 << 18) as offloaded:
        weight: Any = model.in_proj_weight
        with offloaded.gathered(modify=True):
            parts = (*weight.chunk(3), *weight.split(256))
            weight.data = torch.zeros(768, 256)
            for part, values in zip(parts, before.split(256) * 2, strict=True):
                assert torch.equal(part, values)
            weight.chunk(3)[1].fill_(2)
            x, y = torch.randn(5, 1, 256), torch.randn(7, 1, 256)
            inside = model(x, y, y)[0]
        assert torch.equal(model(x, y, y)[0], inside)
    expected = torch.zeros(768, 256)
    expected[256:512] = 2
    assert torch.equal(model.in_proj_weight, expected)
