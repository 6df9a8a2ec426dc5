"""Several blocks at once, and hooks of the program: whose a saved tensor is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import infinity
from tests.support.models import seeded
from tests.support.training import same_bits, values_of

WIDTH = 128
ROWS = 1024
"""What a layer saves is 512 KiB."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def taken_bytes(offloaded: infinity.OffloadedModel) -> int:
    counts = offloaded.report().activation_bytes
    return counts["in host"] + counts["on nvme"]


def _hooks_of_this_thread() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class _Pair:
    """Two models, each in a block of its own."""

    def __init__(self, nvme: Path) -> None:
        self.nvme = nvme
        self.stacks = {"student": ExitStack(), "teacher": ExitStack()}
        self.models = {name: seeded(mlp) for name in self.stacks}
        self.offloaded: dict[str, infinity.OffloadedModel] = {}

    def enter(self, name: str, activations: str) -> None:
        block = infinity.offload(
            self.models[name],
            self.nvme,
            host_memory="32MiB",
            activations=activations,
            optimizer=infinity.AdamW(lr=1e-3) if name == "student" else None,
        )
        self.offloaded[name] = self.stacks[name].enter_context(block)

    def taken(self, name: str) -> int:
        return taken_bytes(self.offloaded[name])

    def loss(self, name: str) -> torch.Tensor:
        loss: torch.Tensor = self.models[name](batch()).sum()
        return loss


@pytest.fixture
def pair(nvme: Path, one_thread: None) -> Iterator[_Pair]:
    made = _Pair(nvme)
    yield made
    for stack in made.stacks.values():
        stack.close()
    assert _hooks_of_this_thread() is None


@pytest.mark.parametrize("of_teacher", ["keep", "nvme"])
@pytest.mark.parametrize("order", [("student", "teacher"), ("teacher", "student")])
def test_saved_tensors_belong_to_the_block_whose_model_computes(
    pair: _Pair, order: tuple[str, str], of_teacher: str
) -> None:
    for name in order:
        pair.enter(name, "nvme" if name == "student" else of_teacher)
    loss = pair.loss("student")
    assert pair.taken("student") > 0
    assert pair.taken("teacher") == 0
    of_student = pair.taken("student")
    other = pair.loss("teacher")
    assert pair.taken("student") == of_student
    assert (pair.taken("teacher") > 0) == (of_teacher == "nvme")
    del other
    loss.backward()
    pair.offloaded["student"].step()


@pytest.mark.parametrize("order", [("student", "teacher"), ("teacher", "student")])
@pytest.mark.parametrize("first", ["student", "teacher"])
def test_blocks_that_end_in_any_order_take_their_own_hooks_off(
    pair: _Pair, order: tuple[str, str], first: str
) -> None:
    for name in order:
        pair.enter(name, "nvme")
    pair.stacks[first].close()
    other = "teacher" if first == "student" else "student"
    loss = pair.loss(other)
    assert pair.taken(other) > 0
    loss.backward()
    pair.stacks[other].close()
    assert _hooks_of_this_thread() is None


def test_a_graph_goes_on_when_a_block_within_its_own_has_ended(pair: _Pair) -> None:
    pair.enter("student", "nvme")
    pair.enter("teacher", "nvme")
    loss = pair.loss("student")
    with torch.no_grad():
        pair.loss("teacher")
    loss = loss + pair.models["student"](batch(1)).square().sum()
    pair.stacks["teacher"].close()
    loss.backward()
    pair.offloaded["student"].step()


@pytest.mark.parametrize("order", [("student", "teacher"), ("teacher", "student")])
def test_what_a_loss_saves_outside_of_models_is_taken_where_one_takes_it(
    pair: _Pair, order: tuple[str, str]
) -> None:
    for name in order:
        pair.enter(name, "nvme" if name == "student" else "keep")
    with torch.no_grad():
        target = pair.models["teacher"](batch())
    made = pair.models["student"](batch())
    before = pair.taken("student")
    kept = [(made - target).abs().square().sqrt()]
    assert pair.taken("student") > before
    kept[0].sum().backward()


def test_a_model_called_by_a_hook_of_another_has_its_own_saved_tensors(pair: _Pair) -> None:
    pair.enter("student", "keep")
    pair.enter("teacher", "nvme")

    def also(_module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        within: torch.Tensor = pair.models["teacher"](output)
        return within

    handle = pair.models["student"][1].register_forward_hook(also)
    loss = pair.loss("student")
    handle.remove()
    alone = pair.taken("teacher")
    del loss
    beside = pair.loss("teacher")
    assert alone == pair.taken("teacher") > 0
    del beside


def test_hooks_that_a_program_puts_on_stay_when_a_block_ends_under_them(pair: _Pair) -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(3, requires_grad=True)
    pair.enter("student", "keep")
    pair.enter("teacher", "keep")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pair.stacks["student"].close()
        (x * x).sum().backward()
        assert len(packed) == 2
        pair.stacks["teacher"].close()
        (x * x).sum().backward()
        assert len(packed) == 4
    (x * x).sum().backward()
    assert len(packed) == 4


def _train(model: nn.Module, step: Callable[[], object]) -> None:
    for seed in range(2):
        model(batch(seed)).square().sum().backward()
        step()


@pytest.mark.parametrize("activations", ["keep", "nvme"])
def test_hooks_around_a_block_are_called_in_it_with_all_but_weights(
    nvme: Path, one_thread: None, activations: str
) -> None:
    """In these the backward pass sees another tensor than was saved."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if tensor.shape == (ROWS, WIDTH) else tensor

    model, plain = seeded(mlp), seeded(mlp)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with saved_tensors_hooks(pack, unpack):
        _train(plain, step)
        expected, shapes[:] = [*shapes], []
        with infinity.offload(
            model,
            nvme,
            host_memory="32MiB",
            activations=activations,
            optimizer=infinity.AdamW(lr=1e-3),
        ) as offloaded:
            _train(model, offloaded.step)
            counts = offloaded.report().activation_bytes
        assert _hooks_of_this_thread()[0] is pack
    assert (WIDTH, WIDTH) in expected
    assert shapes == [shape for shape in expected if shape != (WIDTH, WIDTH)]
    assert (counts["in host, peak"] > 0) == (activations == "nvme")
    after = values_of(plain)
    assert all(same_bits(value, after[name]) for name, value in values_of(model).items())


def test_save_on_cpu_around_a_block_keeps_what_it_made(nvme: Path, one_thread: None) -> None:
    model = seeded(mlp)
    with (
        save_on_cpu(),
        infinity.offload(model, nvme, host_memory="32MiB", activations="nvme") as offloaded,
    ):
        _train(model, offloaded.step)
        assert offloaded.report().activation_bytes["in host, peak"] == 0
