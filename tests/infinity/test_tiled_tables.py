"""Embeddings and tied heads in tiles: a table that is larger than ``host_memory`` trains."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

import infinity
from infinity.parameters.records import records_of
from infinity.tiling.layers import Tiling
from tests.support.proof import matrix
from tests.support.tables import TABLE_BYTES, TILE, WORDS, Words, loss_of, tokens_of
from tests.support.training import (
    WHOLE,
    assert_same_runs,
    least_budget,
    same_bits,
    same_values,
    train,
    values_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def untied() -> nn.Module:
    return Words(tied=False)


@pytest.mark.parametrize(
    ("make", "accumulate"), matrix(product([Words, untied], [1, 2]), usual=[(untied, 2)])
)
def test_table_larger_than_host_memory_trains_as_in_memory(
    make: Any, accumulate: int, nvme: Path
) -> None:
    least = least_budget(make, nvme, max_parameter_bytes=TILE)
    assert least < TABLE_BYTES
    planned = infinity.plan(make(), host_memory=least, max_parameter_bytes=TILE)
    assert planned.fits
    assert planned.least_host_bytes == least
    steps = {"steps": 5, "accumulate": accumulate}
    runs = {
        name: train(make, loss_of, nvme, host_memory=budget, max_parameter_bytes=TILE, **steps)
        for name, budget in (("whole", WHOLE), ("least", least))
    }
    assert_same_runs(runs)
    assert runs["least"].read_bytes
    plain = train(make, loss_of, nvme, host_memory=WHOLE, **steps)
    assert plain.losses[0] == runs["least"].losses[0]
    if make is untied:
        assert_same_runs({"plain": plain, "least": runs["least"]})
    else:  # the gradient of the head's input is a sum over tiles
        assert torch.tensor(plain.losses).allclose(torch.tensor(runs["least"].losses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"scale_grad_by_freq": True}], ids=str)
def test_rows_and_their_gradients_have_the_bits_of_the_whole_table(
    options: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(1001, 257, dtype=dtype, **options))
    # Most tiles have none of these, one of them has many, and the padding is there.
    tokens = torch.cat([torch.randint(0, 400, (40,)), torch.tensor([7, 7, 399, 1000] * 9)])
    weights = torch.randn(2, 38, 257, dtype=dtype)
    results: list[Any] = []
    for bound in (None, 1 << 18):
        table = model[0]
        table.weight.grad = None
        if bound is None:
            out = model(tokens.view(2, 38))
            (out * weights).sum().backward()
            results.append((out, table.weight.grad))
            continue
        with Tiling(model, records_of(model, None), bound, None):
            parts = [*model.parameters()]
            assert len(parts) > 1
            out = model(tokens.view(2, 38))
            (out * weights).sum().backward()
            results.append((out, torch.cat([part.grad for part in parts])))
            for part in parts:
                part.grad = None
    (out, gradient), (tiled_out, tiled_gradient) = results
    assert same_bits(out.detach(), tiled_out.detach())
    assert same_bits(gradient, tiled_gradient)


def test_logits_of_a_tied_head_are_the_products_with_the_whole_table(nvme: Path) -> None:
    model = Words()
    expected = model(tokens_of(0)).detach()
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=TILE):
        assert torch.equal(model(tokens_of(0)), expected)


def test_recomputed_passes_and_whole_ones_give_the_same(nvme: Path) -> None:
    class Recomputing(Words):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = recomputed(
                lambda t: self.blocks[0](self.embedding(t)), tokens, use_reentrant=False
            )
            return recomputed(self.head, hidden, use_reentrant=False)

    runs = {}
    for make in (Words, Recomputing):
        least = least_budget(make, nvme, max_parameter_bytes=TILE)
        runs[make.__name__] = train(
            make, loss_of, nvme, host_memory=least, steps=2, max_parameter_bytes=TILE
        )
    assert_same_runs(runs)


@pytest.mark.parametrize("how", matrix(["autocast", "compute_dtype"], usual=["compute_dtype"]))
def test_mixed_precision_is_that_of_the_whole_table(how: str, nvme: Path) -> None:
    compute_dtype = torch.bfloat16 if how == "compute_dtype" else None

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            return loss_of(model, step)

    options: dict[str, Any] = {"steps": 2, "compute_dtype": compute_dtype}
    plain = train(untied, loss, nvme, host_memory=WHOLE, **options)
    options["max_parameter_bytes"] = TILE
    tiled = train(untied, loss, nvme, host_memory=WHOLE, **options)
    assert_same_runs({"plain": plain, "tiled": tiled})
    runs = {
        name: train(Words, loss, nvme, host_memory=budget, **options)
        for name, budget in (("whole", WHOLE), ("some", 48 << 20))
    }
    assert_same_runs(runs)


def test_checkpoints_with_and_without_tiles_are_interchangeable(nvme: Path, tmp_path: Path) -> None:
    saved: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for bound in (None, TILE):
        model = Words()
        with infinity.offload(
            model, nvme, host_memory=WHOLE, max_parameter_bytes=bound
        ) as offloaded:
            if saved:
                offloaded.load(tmp_path / "None")
            else:
                loss_of(model, 0).backward()
                offloaded.step()
            offloaded.save(tmp_path / f"{bound}")
            offloaded.export(tmp_path / f"export-{bound}")
            saved[bound] = load_file(tmp_path / f"export-{bound}" / "model.safetensors")
            with offloaded.gathered():
                names[bound] = list(model.state_dict())
        assert names[bound] == list(model.state_dict())
    assert names[None] == names[TILE]
    assert same_values(saved[None], saved[TILE])
    with infinity.offload(Words(), nvme, host_memory=WHOLE) as offloaded:
        offloaded.load(tmp_path / f"{TILE}")


def test_model_on_meta_begins_as_without_tiles(nvme: Path, tmp_path: Path) -> None:
    exported = []
    for bound in (None, TILE):
        with torch.device("meta"):
            model = Words()
            model.embedding = nn.Embedding(WORDS, 256)
            model.head.weight = model.embedding.weight
        torch.manual_seed(3)
        with infinity.offload(
            model, nvme, host_memory=WHOLE, max_parameter_bytes=bound
        ) as offloaded:
            offloaded.export(tmp_path / f"{bound}")
        assert model.head.weight is model.embedding.weight
        assert model.embedding.weight.is_meta
        exported.append(load_file(tmp_path / f"{bound}" / "model.safetensors"))
    assert same_values(*exported)


def test_leaving_gives_the_same_tied_parameter_back(nvme: Path) -> None:
    model = Words()
    parameter, before = model.embedding.weight, values_of(model)
    modules, names = [*model.modules()], [name for name, _ in model.named_parameters()]
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=TILE) as offloaded:
        loss_of(model, 0).backward()
        offloaded.step()
    assert model.embedding.weight is parameter
    assert model.head.weight is parameter
    assert [*model.modules()] == modules
    assert [name for name, _ in model.named_parameters()] == names
    assert not same_values(before, values_of(model))
    assert F.embedding(torch.tensor([3]), parameter).shape == (1, 256)
