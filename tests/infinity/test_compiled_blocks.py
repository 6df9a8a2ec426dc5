"""Blocks that are compiled by torch.compile train offloaded to the bits that they train to in
memory, from the same graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.compiled import is_wrapper
from tests.support.compiled import QUIET, WAYS, Graphs
from tests.support.models import Gpt, seeded, token_loss, vector_loss
from tests.support.proof import matrix
from tests.support.training import WHOLE, Plain, budgets, same_bits

pytestmark = QUIET

LR = 3e-3
STEPS = 4
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that has seen nothing, and leaves nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(way: str, graphs: Graphs, **options: Any) -> Gpt:
    model = Gpt(**options)
    WAYS[way](model.blocks, graphs)
    return model


def passes(model: nn.Module, step: int, backward: Callable[[torch.Tensor], None]) -> list[float]:
    """Two backward passes that add up, and one of evaluation behind them."""
    losses = []
    for part in range(2):
        torch.manual_seed(2 * step + part)  # of dropout
        loss = token_loss(model, 2 * step + part)
        backward(loss / 2)
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(token_loss(model.eval(), step).item())
    model.train()
    return losses


def in_memory(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    factory = partial(torch.optim.AdamW, lr=LR, fused=True)
    plain = Plain(seeded(make), factory, dtype=None if dtype == FP32 else dtype)
    losses = []
    for step in range(STEPS):
        losses += passes(plain.model, step, torch.Tensor.backward)
        plain.step()
    return losses, {name: master.detach() for name, master in plain.masters.items()}


@pytest.fixture
def _no_cache_of_autocast() -> Iterator[None]:
    """As inside a block; graphs ask for it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    yield
    torch.set_autocast_cache_enabled(before)


def check_beside_memory(
    make: Callable[[], nn.Module], graphs: Graphs, dtype: torch.dtype, nvme: Path, **options: Any
) -> None:
    """The bits of memory under every budget. Graphs are those that were made there or, where
    the compiler forgets them, as many, and made by the second step.
    """
    losses, values = in_memory(make, dtype)
    num_graphs = graphs.count
    options |= {"compute_dtype": dtype, "optimizer": infinity.AdamW(lr=LR)}
    for name, host_memory in budgets(make, nvme, **options).items():
        if is_fresh := graphs.backend != "inductor" or name == "least":
            torch.compiler.reset()
        graphs.count, counts, found = 0, [], []
        model = seeded(make)
        with infinity.offload(model, nvme, host_memory=host_memory, **options) as offloaded:
            for step in range(STEPS):
                found += passes(model, step, torch.Tensor.backward)
                offloaded.step()
                counts.append(graphs.count)
            offloaded.flush()
            assert (offloaded.report().read_bytes > 0) == (name != "whole")
        assert found == losses, name
        assert counts[1:] == [num_graphs if is_fresh else 0] * (STEPS - 1), name
        trained = dict(model.named_parameters())
        assert trained.keys() == values.keys()
        assert all(same_bits(trained[key], value) for key, value in values.items()), name


@pytest.mark.parametrize(
    ("way", "backend", "dtype"),
    matrix(
        [
            *product(WAYS, ("eager", "aot_eager"), (FP32, BF16)),
            ("layer.compile()", "inductor", BF16),
            ("torch.compile(layer)", "inductor", FP32),
        ],
        usual=[
            ("layer.compile()", "aot_eager", BF16),
        ],
    ),
)
@pytest.mark.usefixtures("one_thread", "_no_cache_of_autocast")
def test_compiled_blocks_train_to_the_bits_of_memory(
    way: str, backend: str, dtype: torch.dtype, nvme: Path
) -> None:
    graphs = Graphs(backend)
    check_beside_memory(partial(made, way, graphs, dropout=0.1), graphs, dtype, nvme)


@pytest.mark.parametrize(
    ("recompute", "backend"),
    matrix(
        product(("non-reentrant", "reentrant"), ("eager", "aot_eager", "inductor")),
        usual=[],
    ),
)
@pytest.mark.usefixtures("one_thread", "_no_cache_of_autocast")
def test_compiled_blocks_under_checkpointing_train_to_the_bits_of_memory(
    recompute: str, backend: str, nvme: Path
) -> None:
    graphs = Graphs(backend)
    make = partial(made, "layer.compile()", graphs, recompute=recompute)
    check_beside_memory(make, graphs, FP32, nvme)


class Wide(nn.Module):
    """Layers and a table that are cut into tiles as the block begins."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16384), nn.Linear(16384, 16)
            self.table = nn.Embedding(16384, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.table((x[:, 0] * 1000).long().abs())
            down: torch.Tensor = self.down(nn.functional.gelu(self.up(x + rows)) * 2)
            return down.relu() + x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.usefixtures("one_thread")
def test_tiled_layers_that_are_compiled_in_the_block_compute_between_graphs(nvme: Path) -> None:
    runs = []
    for compiled in (False, True):
        model, graphs = seeded(Wide), Graphs()
        with infinity.offload(
            model, nvme, host_memory=WHOLE, max_parameter_bytes=1 << 18
        ) as offloaded:
            if compiled:
                for layer in model.layers:
                    layer.compile(backend=graphs)
            losses = []
            for number in range(3):
                loss = vector_loss(model, number, width=16)
                loss.backward()
                offloaded.step()
                losses.append(loss.item())
        runs.append(losses)
        assert (graphs.count > 0) == compiled
    assert runs[0] == runs[1]


def test_nothing_is_compiled_while_another_thread_imports_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module is known before it has anything."""
    name = "torch._dynamo.eval_frame"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not is_wrapper(nn.Linear(1, 1))
