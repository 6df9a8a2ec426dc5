"""Saved tensors that lie in memory of the program, of other processes, or of a parent."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.activations.storage import SavedActivation
from infinity.activations.tiers import NvmeActivations
from swap.timeline import Timeline
from tests.support.activations import KIB, MIB, Hooks, Make, chain, large

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["slot", "expanded", "turned"])
@pytest.mark.parametrize("whose", ["numpy", "torch"])
def test_slots_of_a_buffer_that_numpy_fills_one_after_the_other_come_back_as_filled(
    whose: str, kind: str, on_nvme: Make, timeline: Timeline
) -> None:
    if whose == "numpy":
        memory = np.zeros((9, 256 * KIB), dtype=np.float32)
        buffer = torch.from_numpy(memory)
    else:
        buffer = torch.zeros(9, 256 * KIB)
        memory = buffer.numpy()
    scale, other = torch.ones(1, requires_grad=True), large(1, 4 * MIB)
    with Hooks(on_nvme(4 * MIB)):
        products = []
        for number, slot in enumerate(buffer):
            memory[number] = number + 1
            saved = slot.view(512, 512)
            saved = {"slot": saved, "expanded": saved.expand(4, 512, 512), "turned": saved.t()}[
                kind
            ]
            products.append((saved * scale).mean() + 0 * chain(other, 3).sum())
        (found,) = torch.autograd.grad(torch.stack(products).sum(), scale)
    assert found == sum(range(10))
    assert timeline.nbytes["write"]


@pytest.mark.parametrize("holds", ["array", "storage", "typed storage"])
def test_buffer_that_the_program_fills_by_other_means_is_seen_as_it_is(
    holds: str, on_nvme: Make
) -> None:
    memory = np.zeros(256 * KIB, dtype=np.float32)
    buffer = torch.from_numpy(memory) if holds == "array" else torch.zeros(256 * KIB)
    kept: Any = None
    if holds == "storage":
        kept = buffer.untyped_storage()
    elif holds == "typed storage":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = buffer.storage()
    scale = torch.ones(1, requires_grad=True)
    with Hooks(on_nvme(2 * MIB)):
        loss = (buffer * scale).sum() + 0 * chain(large(0), 12).sum()
        del buffer
        loss = loss + 0 * chain(large(0), 12).sum()
        if holds == "array":
            memory.fill(1)
        else:
            torch.empty(0).set_(kept).fill_(1)
        (found,) = torch.autograd.grad(loss, scale)
    assert found == 256 * KIB


def test_activation_that_numpy_looked_at_is_moved_also_by_its_views(
    on_nvme: Make, timeline: Timeline
) -> None:
    x = torch.ones(256, 1024, requires_grad=True)
    activations = on_nvme(2 * MIB)
    with Hooks(activations):
        y = x * 1
        for _ in range(12):
            y = torch.cat([part * part.sigmoid() for part in (y * 2).chunk(2, -1)], -1)
            assert y.detach().numpy().shape == (256, 1024)
        del y
        chain(large(0), 2)
        assert activations.counts()["in host"] <= 2 * MIB
    assert timeline.nbytes["write"] > 12 * MIB


class _Filling(torch.autograd.Function):
    """Its result lies in memory of numpy's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: np.ndarray[Any, Any]) -> torch.Tensor:
        memory[:] = x.numpy()
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("fills", ["torch", "function"])
def test_memory_of_numpy_that_torch_fills_is_seen_as_it_is(fills: str, on_nvme: Make) -> None:
    memory = np.zeros((4, 128 * KIB), dtype=np.float32)
    scale = torch.ones(1, requires_grad=True)
    with Hooks(on_nvme(2 * MIB)):
        loss = 0 * chain(large(0), 12).sum()
        for row in memory:
            x = torch.full((128 * KIB,), 2.0) * scale
            y = torch.from_numpy(row).copy_(x) if fills == "torch" else _Filling.apply(x, row)
            loss = loss + (y * y).sum()
            del x, y
        loss = loss + 0 * chain(large(0), 12).sum()
        memory[:] = 7
        (found,) = torch.autograd.grad(loss, scale)
    assert found == 4 * 128 * KIB * 2 * 7 * 2


@pytest.mark.parametrize("whose", ["numpy", "torch", "file"])
def test_data_set_whose_slices_are_saved_is_neither_written_nor_counted(
    whose: str, on_nvme: Make, timeline: Timeline
) -> None:
    rows = np.random.default_rng(0).random((4096, 4096), dtype=np.float32)  # 64 MiB
    if whose == "file":
        with tempfile.NamedTemporaryFile() as file:
            np.save(file, rows)
            rows = np.load(file.name, mmap_mode="c")
    data = torch.tensor(rows) if whose == "torch" else torch.from_numpy(rows)
    del rows
    weight = torch.ones(8, 4096, requires_grad=True)
    activations = on_nvme(2 * MIB)
    with Hooks(activations):
        for step in range(3):
            batch = data[step * 64 : step * 64 + 64]
            loss = chain(F.linear(batch, weight).repeat(1, 512), 9).sum()
            assert activations.counts()["in host"] <= 2 * MIB
            (gradient,) = torch.autograd.grad(loss, weight)
            assert gradient.shape == weight.shape
    assert 0 < timeline.nbytes["write"] < 64 * MIB
    assert activations.peak_bytes <= 2 * MIB


def test_what_the_program_lets_go_of_behind_forward_is_written_then(
    on_nvme: Make, timeline: Timeline
) -> None:
    activations = on_nvme(2 * MIB)
    with Hooks(activations):
        held = [torch.sigmoid(large(seed)) for seed in range(20)]
        loss = torch.stack([output.sum() for output in held]).sum()
        assert timeline.nbytes["write"] == 0
        assert activations.counts()["in host"] == 0
        held.clear()
        chain(large(0), 1)
        assert activations.counts()["in host"] <= 2 * MIB
        assert timeline.nbytes["write"] >= 14 * 512 * KIB
        loss.backward()


def test_two_versions_of_one_storage_do_not_hold_one_another(
    on_nvme: Make, timeline: Timeline
) -> None:
    activations = on_nvme(2 * MIB)
    w = torch.ones(128 * KIB, requires_grad=True)
    with Hooks(activations):
        y: torch.Tensor = w
        for _ in range(20):
            y = torch.relu_(y * 1.01)
            y = y + (y.data * w) * 0.001  # .data counts versions apart
        loss = y.sum()
        del y
        assert activations.counts()["in host"] <= 2 * MIB
        assert timeline.nbytes["write"] > 20 * 512 * KIB
        loss.backward()


def test_calls_of_a_handler_amid_another_one_wait_for_nothing(on_nvme: Make) -> None:
    activations = on_nvme(2 * MIB)
    program = torch.ones(128 * KIB)
    theirs = activations.save(program)
    written = activations.save(torch.full((128 * KIB,), 2.0))
    with Hooks(activations):
        loss = chain(large(0), 12).sum()
    assert theirs is not None
    assert written is not None
    assert written.storage.extent is not None
    with activations._lock:  # as the frame that a handler broke into
        assert activations.save(torch.ones(128 * KIB)) is None
        assert torch.equal(activations.restore(theirs), program)
        assert activations.counts()["on nvme"] > 0
        with pytest.raises(RuntimeError, match="of a signal handler"):
            activations.restore(written)
    assert (activations.restore(written) == 2).all()
    loss.backward()


def _compute(activations: NvmeActivations, theirs: SavedActivation) -> None:
    with Hooks(activations):
        chain(x := large(0), 20).sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="was forked from"):
        activations.restore(theirs)


def test_forked_child_computes_with_what_is_its_own(on_nvme: Make) -> None:
    activations = on_nvme(2 * MIB)
    theirs = activations.save(torch.ones(128 * KIB))
    with Hooks(activations):
        loss = chain(large(0), 12).sum()
        child = multiprocessing.get_context("fork").Process(
            target=_compute, args=(activations, theirs)
        )
        with activations._lock:  # as another thread of the parent would
            child.start()
        child.join(60)
        assert child.exitcode == 0
        loss.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_nested_tensors_are_left_to_autograd(mode: str, nvme: Path) -> None:
    parts = [torch.randn(300, 256), torch.randn(500, 256)]
    model = nn.Linear(256, 256)
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        nested = torch.nested.nested_tensor(parts, requires_grad=True)
        model(nested).to_padded_tensor(0.0).square().sum().backward()
        assert nested.grad is not None


@pytest.mark.parametrize("mode", ["keep", "host", "nvme"])
def test_saved_tensor_may_be_moved_to_shared_memory(mode: str, nvme: Path) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        w = torch.ones(512, 512, requires_grad=True)
        hidden = model(torch.randn(512, 512)).detach()
        loss = (hidden * w).sum()
        hidden.share_memory_()
        (gradient,) = torch.autograd.grad(loss, w)
        assert torch.equal(gradient, hidden)
