"""Saved tensors that a program, or a backward function of Python, does more with than read them."""

from __future__ import annotations

import multiprocessing
import tempfile
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

MODES = ("keep", "host", "nvme")
each_mode = pytest.mark.parametrize("mode", MODES)


class _Returning(torch.autograd.Function):
    """The gradient of its first argument is its second."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return w.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return x, None


class _Subclass(torch.Tensor):
    pass


@each_mode
@pytest.mark.parametrize("way", ["leaf", "view", "two"])
@pytest.mark.parametrize(
    "kind", ["batch", "leaf", "subclass", "result", "weights", "turned", "sparse"]
)
def test_gradient_that_a_function_saved_is_no_memory_of_others(
    kind: str, way: str, mode: str, nvme: Path
) -> None:
    model = nn.Linear(512, 512)
    before = model.weight.detach().clone()
    with infinity.offload(model, nvme, host_memory="64MiB", activations=mode) as offloaded:
        batch = torch.randn(512, 512)
        result = model(batch)
        given: dict[str, torch.Tensor] = {
            "batch": batch,
            "leaf": torch.randn(512, 512, requires_grad=True),
            "subclass": torch.randn(512, 512).as_subclass(_Subclass).requires_grad_(),
            "result": result,
            "weights": model.weight,
            "turned": result.t(),
            "sparse": torch.eye(512).to_sparse().requires_grad_(),
        }
        saved = given[kind]
        expected = saved.detach().to_dense().clone()
        w = torch.zeros(512, 512, requires_grad=True)
        arrives = w.view(512, 512) if way == "view" and kind != "sparse" else w
        loss = _Returning.apply(arrives, saved) + result.sin().sum()
        times = 1
        if way == "two":
            loss, times = loss + _Returning.apply(arrives, saved), 2
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert w.grad is not None
            assert torch.equal(w.grad.to_dense(), times * expected)
            if kind != "sparse":
                w.grad.mul_(3)
            w.grad = None
        if kind != "weights":
            assert torch.equal(saved.detach().to_dense(), expected)
        with offloaded.gathered([model.weight]):
            assert torch.equal(model.weight, before)
        offloaded.optimizer.zero_grad()


def test_nodes_that_never_run_are_not_hooked_again_and_again(nvme: Path) -> None:
    model = nn.Linear(4, 4)
    with infinity.offload(model, nvme, host_memory="64MiB"):
        w, other = (torch.zeros(4, requires_grad=True) for _ in range(2))
        (node, _), _ = _Returning.apply(w, other * 2).grad_fn.next_functions
        waiting = set()
        for _ in range(3):
            torch.autograd.grad(_Returning.apply(w, other * 2), w)
            waiting.add(node.metadata["infinity.returned"])
        assert [arrivals.is_over for arrivals in waiting] == [False]
        _Returning.apply(w, other * 2).backward()
        assert [arrivals.is_over for arrivals in waiting] == [True]


class _Updating(torch.autograd.Function):
    """Its backward adds one to what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, statistic: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(statistic)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (statistic,) = ctx.saved_tensors
        statistic.data.add_(1)
        return gradient * 2, None


@each_mode
@pytest.mark.parametrize("leaf", [False, True])
def test_what_a_backward_function_updates_is_updated(leaf: bool, mode: str, nvme: Path) -> None:
    model = nn.Linear(512, 512)
    statistic = torch.zeros(512, 512, requires_grad=leaf)
    # Its share for saved tensors is less than what is saved.
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        x = torch.randn(512, 512)
        for step in range(3):
            y = _Updating.apply(model(x), statistic)
            chain(y, 12).sum().backward()
            assert (statistic == step + 1).all()


class _Consuming(torch.autograd.Function):
    """Its backward takes what it saved for its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = x.mul_(2).mul_(gradient)
        return result


@pytest.mark.parametrize("host_memory", ["1GiB", "34MiB"])
@each_mode
@pytest.mark.parametrize("what", ["another function", "a second pass", "a view"])
def test_saved_tensor_that_a_backward_function_changed_is_refused_to_others(
    what: str, mode: str, host_memory: str, nvme: Path
) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory=host_memory, activations=mode):
        y = model(torch.randn(512, 512)).mul(2)
        kept = (y if what == "another function" else y[:300]).sin()
        # Backward runs in the opposite order: the later function is the first.
        changes = _Consuming.apply(y).sum()
        others = chain(torch.randn(512, 512, requires_grad=True), 8).sum()
        loss = changes + others if what == "a second pass" else kept.sum() + changes + others
        del y, kept
        if what == "a second pass":
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            loss.backward()


def test_saved_tensor_that_is_changed_where_it_is_looked_at_is_refused(nvme: Path) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory="64MiB", activations="nvme"):
        y = model(torch.randn(512, 512)).exp()
        y.grad_fn._saved_result.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place"):
            y.sum().backward()


@each_mode
def test_backward_in_inference_mode_is_that_of_plain_torch(mode: str, nvme: Path) -> None:
    x = torch.randn(512, 512, requires_grad=True)
    model = nn.Linear(512, 512)
    with torch.inference_mode(False):
        (expected,) = torch.autograd.grad(chain(model(x), 12).sum(), x)
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        loss = chain(model(x), 12).sum()
        with torch.inference_mode():
            (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


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


@each_mode
def test_saved_tensor_may_be_moved_to_shared_memory(mode: str, nvme: Path) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        w = torch.ones(512, 512, requires_grad=True)
        hidden = model(torch.randn(512, 512)).detach()
        loss = (hidden * w).sum()
        hidden.share_memory_()
        (gradient,) = torch.autograd.grad(loss, w)
        assert torch.equal(gradient, hidden)
