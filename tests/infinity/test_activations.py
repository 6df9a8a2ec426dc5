"""Saved tensors on NVMe and in host memory: the bits of plain autograd, within the budget."""

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from aio import AioError, Engine
from aio.backends import MemoryBackend
from infinity.activations import storage as saved_storage
from infinity.activations.offloading import THRESHOLD_BYTES, Activations
from infinity.activations.storage import SavedActivation
from infinity.activations.tiers import (
    ActivationShare,
    HostActivations,
    NvmeActivations,
    activations_for,
    mode_of,
)
from swap.timeline import Timeline
from tests.support.examples import examples
from tests.support.proof import matrix

CPU = torch.device("cpu")
KIB = 1024
MIB = 1024 * KIB
MODES = ("keep", "host", "nvme")


class Block(nn.Module):
    """Attention and a feed-forward part, with views of one storage, dropout and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Buffer(torch.linspace(0.5, 1.5, 600 * width).view(600, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + mixed.transpose(1, 2).flatten(2) * self.scale[: x.shape[1]]
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Net(nn.Module):
    def __init__(self, width: int = 128, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recompute == "no":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


def make_net(dtype: torch.dtype = torch.float32, recompute: str = "no") -> Net:
    torch.manual_seed(0)
    return Net(recompute=recompute).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1, 600, 128, generator=generator).to(dtype).requires_grad_()


def train(model: nn.Module, offloaded: infinity.OffloadedModel, steps: int) -> list[torch.Tensor]:
    """Two micro-batches a step, the first one's backward after the second one's forward."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    inputs = []
    for step in range(steps):
        first, second = batch(2 * step, dtype), batch(2 * step + 1, dtype)
        losses = [model(x).float().square().mean() for x in (first, second)]
        for loss in losses:
            loss.backward()
        offloaded.step()
        inputs += [first.grad, second.grad]
    with offloaded.gathered():
        weights = [p.detach().clone() for p in model.parameters()]
    return weights + [gradient for gradient in inputs if gradient is not None]


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of ``offload`` but for weights."""

    def __init__(self, activations: Activations) -> None:
        def pack(tensor: torch.Tensor) -> Any:
            return activations.save(tensor) or tensor

        def unpack(saved: Any) -> torch.Tensor:
            return activations.restore(saved) if isinstance(saved, SavedActivation) else saved

        super().__init__(pack, unpack)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models compute faster so, when tests share a machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


Make = Callable[[int], NvmeActivations]


@pytest.fixture
def on_nvme(tmp_path: Path, timeline: Timeline) -> Iterator[Make]:
    made = []

    def make(budget_bytes: int) -> NvmeActivations:
        made.append(NvmeActivations(CPU, budget_bytes, [os.fspath(tmp_path)], timeline))
        return made[-1]

    yield make
    for activations in made:
        activations.close()
        activations.close()
        assert list(tmp_path.rglob("*")) == []


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the engines of later stores fail with that probability a block."""

    def install(error: float) -> None:
        backend = MemoryBackend(seed=3, error=error, errno=errno.EIO, short_transfer=0.1)
        monkeypatch.setattr(saved_storage, "Engine", partial(Engine, backend))

    return install


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Every link saves its output."""
    for _ in range(length):
        x = torch.sigmoid(x)
    return x


def large(seed: int, nbytes: int = 512 * KIB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nbytes // 4, generator=generator).requires_grad_()


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return gradient


# Within offload.

TRAINED = [*product((torch.float32, torch.bfloat16), ("no", "reentrant", "non-reentrant"))]
TRAINED_USUALLY = [(torch.float32, "no"), (torch.bfloat16, "non-reentrant")]


@pytest.mark.parametrize(("dtype", "recompute"), matrix(TRAINED, usual=TRAINED_USUALLY))
def test_training_gives_the_same_bits_in_every_mode_and_budget(
    dtype: torch.dtype, recompute: str, tmp_path: Path
) -> None:
    results, reports = [], []
    for mode, budget in (("keep", "1GiB"), ("host", "1GiB"), ("nvme", "1GiB"), ("nvme", "24MiB")):
        model = make_net(dtype, recompute)
        with infinity.offload(model, tmp_path, host_memory=budget, activations=mode) as offloaded:
            results.append(train(model, offloaded, 2))
            reports.append(offloaded.report())
        assert list(tmp_path.rglob("*")) == []
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    keep, host, ample, tight = reports
    assert not any(keep.activation_bytes.values())
    assert host.activation_bytes["in host, peak"] > (MIB if recompute == "no" else 0)
    assert ample.written_bytes == 0
    assert tight.peak_host_bytes <= tight.budget_host_bytes
    for report in reports:
        assert report.activation_bytes["in host"] == 0
        assert "saved tensors in host" in str(report) or report is keep
    if recompute == "no" and dtype == torch.float32:
        assert tight.written_bytes > 8 * MIB
        assert host.activation_bytes["in host, peak"] > tight.activation_bytes["in host, peak"]


def test_least_budget_that_the_error_names_works_and_is_that_of_the_plan(tmp_path: Path) -> None:
    with (
        pytest.raises(infinity.BudgetError, match="activations='nvme'") as refused,
        infinity.offload(make_net(), tmp_path, host_memory="1MiB", activations="nvme"),
    ):
        pass
    least = refused.value.least_host_bytes
    planned = infinity.plan(make_net(), host_memory=least, activations="nvme")
    assert (planned.least_host_bytes, planned.fits) == (least, True)
    assert not infinity.plan(make_net(), host_memory=least - 1, activations="nvme").fits
    model = make_net()
    with infinity.offload(model, tmp_path, host_memory=least, activations="nvme") as offloaded:
        train(model, offloaded, 1)
        assert offloaded.report().peak_host_bytes <= least


def test_backward_outside_the_block_says_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    with infinity.offload(model, tmp_path, host_memory="64MiB", activations="nvme"):
        loss = model(large(0).view(-1, 64)).sum()
    with pytest.raises(RuntimeError, match="call backward inside the block"):
        loss.backward()


def test_unknown_mode_is_refused_before_the_model_is_changed(tmp_path: Path) -> None:
    model = make_net()
    with (
        pytest.raises(ValueError, match="activations='disk' is not one of 'keep', 'host', 'nvme'"),
        infinity.offload(model, tmp_path, activations="disk"),
    ):
        pass
    assert type(next(model.parameters())) is nn.Parameter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rest_bytes", [1, 10 * MIB, 10**9 + 1])
def test_share_leaves_what_the_rest_needs_and_no_smaller_budget_does(
    mode: str, rest_bytes: int
) -> None:
    for device in (CPU, torch.device("cuda")):
        share = ActivationShare(mode=mode_of(mode), device=device, num_directories=2)
        least = share.least_for(rest_bytes)
        assert least - share.bytes_of(least) >= rest_bytes
        assert least - 1 - share.bytes_of(least - 1) < rest_bytes


def test_model_buffers_and_small_tensors_are_left_where_they_are(tmp_path: Path) -> None:
    model = make_net()
    with infinity.offload(model, tmp_path, host_memory="64MiB", activations="host") as offloaded:
        outputs = model(batch(0))
        counted = offloaded.report().activation_bytes["in host"]
        # Each block saves some of: normed, qkv, mixed, x, up, gelu, masks; its scale is a buffer.
        assert 0 < counted < 3 * (600 * 128 * 4) * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1 + 1)
        del outputs
        assert offloaded.report().activation_bytes["in host"] == 0


# The store.


def test_chain_longer_than_the_budget_goes_to_nvme_and_comes_back(
    on_nvme: Make, timeline: Timeline
) -> None:
    expected = gradient_of(partial(chain, length=20), large(0))
    activations = on_nvme(2 * MIB)
    with Hooks(activations):
        assert torch.equal(gradient_of(partial(chain, length=20), large(0)), expected)
    assert 14 * 512 * KIB <= timeline.nbytes["write"] <= 20 * 512 * KIB
    assert 14 * 512 * KIB <= timeline.nbytes["read"] <= 20 * 512 * KIB
    assert activations.peak_bytes <= 2 * MIB


def test_what_fits_half_of_the_budget_is_never_written(on_nvme: Make, timeline: Timeline) -> None:
    activations = on_nvme(8 * MIB)
    with Hooks(activations):
        gradient_of(partial(chain, length=8), large(0))
    assert timeline.nbytes["write"] == 0


def test_reads_run_ahead_of_the_backward_pass(
    on_nvme: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    start_read = saved_storage.Volume.start_read

    def record(volume: Any, storage: Any, *, urgent: bool) -> None:
        asked.append(urgent)
        start_read(volume, storage, urgent=urgent)

    monkeypatch.setattr(saved_storage.Volume, "start_read", record)
    with Hooks(on_nvme(2 * MIB)):
        gradient_of(partial(chain, length=20), large(0))
    assert asked.count(False) > 10 * asked.count(True)


def test_storage_that_several_tensors_share_is_written_once(
    on_nvme: Make, timeline: Timeline
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x).view(3, -1)
        parts = [torch.sigmoid(part) for part in (y[0], y[1], y.t()[:, 2], y[:, ::2].reshape(-1))]
        return sum((part.sum() for part in parts), y.exp().sum())

    x = large(0, 3 * 512 * KIB)
    expected = gradient_of(function, x)
    activations = on_nvme(1 * MIB)
    with Hooks(activations):
        loss = function(x)
        # y once, its exponential, and the sigmoids of the parts.
        assert timeline.nbytes["write"] <= (3 + 3 + 1 + 1 + 1 + 1.5) * 512 * KIB
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, expected)


def test_tensor_changed_in_place_since_it_was_saved_is_refused(on_nvme: Make) -> None:
    activations = on_nvme(1 * MIB)
    with Hooks(activations):
        y = torch.sigmoid(large(0))
        loss = chain(y, 6).sum()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="was modified in place: it is at version 1"):
            loss.backward()


def test_storage_saved_again_after_a_change_has_the_new_bytes(on_nvme: Make) -> None:
    unused: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        unused.append(y.pow(2))  # saves y as it is now
        y = y.mul_(2.0)
        return chain(y.pow(3), 5)  # saves it as it is now

    x = large(0)
    expected = gradient_of(function, x)
    with Hooks(on_nvme(1 * MIB)):
        assert torch.equal(gradient_of(function, x), expected)
        with pytest.raises(RuntimeError, match="was modified in place"):
            unused.pop().sum().backward()


def test_retained_graph_gives_the_same_gradient_again(on_nvme: Make) -> None:
    x = large(0)
    expected = gradient_of(partial(chain, length=9), x)
    activations = on_nvme(1536 * KIB)
    with Hooks(activations):
        loss = chain(x, 9).sum()
        for retain in (True, True, False):
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=retain)
            assert torch.equal(gradient, expected)
            assert activations.counts()["in host"] <= 1536 * KIB
    wait_for_writes(activations)
    assert activations.counts()["on nvme"] == 0


def test_second_derivatives_are_those_of_plain_autograd(on_nvme: Make) -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(chain(x, 4).sum(), x, create_graph=True)
        return first.square()

    x = large(0)
    expected = gradient_of(second, x)
    with Hooks(on_nvme(1 * MIB)):
        assert torch.equal(gradient_of(second, x), expected)


def test_graph_that_is_dropped_without_backward_leaves_nothing(on_nvme: Make) -> None:
    activations = on_nvme(2 * MIB)
    with Hooks(activations):
        loss = chain(large(0), 12).sum()
        counts = activations.counts()
        assert counts["on nvme"] >= 8 * 512 * KIB
        assert counts["in host"] > 0
        del loss
    wait_for_writes(activations)
    assert activations.counts() == counts | {"in host": 0, "on nvme": 0}


def wait_for_writes(activations: NvmeActivations) -> None:
    """Until the engine has let go of what nobody needs any more."""
    activations.counts()
    while activations._volume.leaving_bytes:
        activations._volume.wait_for_leaving()


def test_two_directories_share_what_is_written(tmp_path: Path, timeline: Timeline) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    expected = gradient_of(partial(chain, length=20), large(0))
    activations = NvmeActivations(CPU, MIB, [os.fspath(folder) for folder in folders], timeline)
    with Hooks(activations):
        loss = chain(x := large(0), 20).sum()
        sizes = [sum(f.stat().st_size for f in folder.rglob("*.swap")) for folder in folders]
        assert min(sizes) >= 64 * MIB
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    activations.close()


def test_exception_in_forward_leaves_nothing(on_nvme: Make) -> None:
    activations = on_nvme(2 * MIB)

    def fail() -> None:
        with Hooks(activations):
            chain(large(0), 12)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    wait_for_writes(activations)
    assert activations.counts()["in host"] == 0
    assert activations.counts()["on nvme"] == 0


def test_exception_in_backward_leaves_the_rest_usable(on_nvme: Make) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise KeyError

    x = large(0)
    expected = gradient_of(partial(chain, length=8), x)
    activations = on_nvme(1 * MIB)
    with Hooks(activations):
        loss = chain(Fails.apply(chain(x, 8)), 8).sum()
        with pytest.raises(KeyError):
            loss.backward()
        del loss
        assert torch.equal(gradient_of(partial(chain, length=8), x), expected)


def test_storage_larger_than_the_budget_is_held_only_while_it_is_used(on_nvme: Make) -> None:
    x = large(0, 3 * MIB)
    expected = gradient_of(partial(chain, length=3), x)
    activations = on_nvme(1 * MIB)
    with Hooks(activations):
        loss = chain(x, 3).sum()
        assert activations.counts()["in host"] == 0
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, expected)
    assert activations.peak_bytes <= 1 * MIB


def test_small_sparse_and_subclassed_tensors_and_parameters_are_left_alone(on_nvme: Make) -> None:
    class Mine(torch.Tensor):
        pass

    activations = on_nvme(1 * MIB)
    elements = THRESHOLD_BYTES // 4
    assert activations.save(torch.zeros(elements)) is not None
    for tensor in (
        torch.zeros(elements - 1),
        nn.Parameter(torch.zeros(elements)),
        torch.zeros(elements).as_subclass(Mine),
        torch.zeros(elements, dtype=torch.complex64).conj(),
        torch.zeros(elements).to_sparse(),
        torch.zeros(elements, device="meta"),
    ):
        assert activations.save(tensor) is None


def test_storage_resized_behind_autograd_is_refused(on_nvme: Make) -> None:
    activations = on_nvme(8 * MIB)
    tensor = large(0).detach()
    saved = activations.save(tensor)
    assert saved is not None
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was resized before the backward pass"):
        activations.restore(saved)


def test_keep_takes_nothing_and_host_on_a_cpu_counts(timeline: Timeline, tmp_path: Path) -> None:
    for mode, taken in (("keep", 0), ("host", 3 * 512 * KIB)):
        share = ActivationShare(mode=mode_of(mode), device=CPU, num_directories=1)
        activations = activations_for(share, 1 << 30, [os.fspath(tmp_path)], timeline)
        with Hooks(activations):
            loss = chain(large(0), 3).sum()
            assert activations.counts()["in host"] == taken
            loss.backward()
        del loss
        assert activations.counts() == {"in host": 0, "in host, peak": taken, "on nvme": 0}
        assert activations.peak_budget_bytes == 0
        activations.close()
    assert isinstance(activations, HostActivations)
    assert list(tmp_path.rglob("*")) == []


# Faults.


def test_io_errors_are_raised_and_the_next_call_tries_again(
    on_nvme: Make, faulty: Callable[[float], None]
) -> None:
    faulty(0.3)
    activations = on_nvme(1 * MIB)
    tensors = [large(seed).detach() for seed in range(12)]
    saved, failures = [], 0
    for tensor in tensors:
        handle = None
        while handle is None:
            try:
                handle = activations.save(tensor)
            except AioError as error:
                failures += error.errno == errno.EIO
        saved.append(handle)
    for handle, tensor in [*zip(saved, tensors, strict=True)][::-1]:
        found = None
        while found is None:
            try:
                found = activations.restore(handle)
            except AioError as error:
                failures += error.errno == errno.EIO
        assert torch.equal(found, tensor)
    assert failures > 3


def test_io_error_in_a_training_step_is_an_aio_error(
    tmp_path: Path, faulty: Callable[[float], None]
) -> None:
    faulty(1.0)
    model = make_net()
    with infinity.offload(model, tmp_path, host_memory="24MiB", activations="nvme"):
        with pytest.raises(AioError) as failure:
            model(batch(0)).sum().backward()
        assert failure.value.errno == errno.EIO
    assert list(tmp_path.rglob("*")) == []


def test_full_disk_is_an_aio_error_in_forward(
    on_nvme: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise AioError("no space", errno=errno.ENOSPC)

    activations = on_nvme(1 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr("swap.storage.extents.ExtentStore.allocate", full)
        with Hooks(activations), pytest.raises(AioError, match="no space"):
            chain(large(0), 4)
    with Hooks(activations):
        gradient_of(partial(chain, length=4), large(0))


def test_directory_that_is_not_there_is_refused_and_leaves_the_model(tmp_path: Path) -> None:
    model = make_net()
    with (
        pytest.raises(FileNotFoundError, match="nowhere"),
        infinity.offload(model, tmp_path / "nowhere", host_memory="1GiB", activations="nvme"),
    ):
        pass
    assert type(next(model.parameters())) is nn.Parameter


# By its properties, and by its memory.


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_order_of_calls_gives_the_bits_back_within_the_budget(
    data: st.DataObject, tmp_path: Path
) -> None:
    budget = data.draw(st.integers(1, 6)) * 512 * KIB
    activations = NvmeActivations(CPU, budget, [os.fspath(tmp_path)], Timeline())
    try:
        make_calls(data, activations)
        wait_for_writes(activations)
        counts = activations.counts()
        assert (counts["in host"], counts["on nvme"]) == (0, 0)
        assert counts["in host, peak"] <= budget
    finally:
        activations.close()


def make_calls(data: st.DataObject, activations: NvmeActivations) -> None:
    live: list[tuple[SavedActivation, torch.Tensor]] = []
    bases: list[torch.Tensor] = []
    for seed in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["save", "save", "view", "restore", "drop", "forget"]))
        if action == "save":
            bases.append(large(seed, data.draw(st.integers(64, 512)) * 4 * KIB).detach())
        if action in ("save", "view") and bases:
            base = bases[-1] if action == "save" else data.draw(st.sampled_from(bases))
            view = base[data.draw(st.integers(0, 3)) :: data.draw(st.integers(1, 3))]
            saved = activations.save(view)
            assert saved is not None
            live.append((saved, view.clone()))
        elif action == "restore" and live:
            position = data.draw(st.integers(0, len(live) - 1))
            assert torch.equal(activations.restore(live[position][0]), live[position][1])
        elif action == "drop" and live:
            live.pop(data.draw(st.integers(0, len(live) - 1)))
        elif action == "forget" and bases:
            bases.pop(data.draw(st.integers(0, len(bases) - 1)))
        assert activations.counts()["in host"] <= activations.budget_bytes
    while live:
        saved, expected = live.pop()
        assert torch.equal(activations.restore(saved), expected)


_PROGRAM = """
import sys, torch, infinity

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        for _ in range(30):
            x = torch.sigmoid(x * self.factor)
        return x

def mebibytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) // 1024

model = Chain()
x = torch.ones(2 << 20)
nvme, mode = sys.argv[1:]
with infinity.offload(model, nvme, host_memory="256MiB", activations=mode) as offloaded:
    before = mebibytes("VmRSS")
    for _ in range(2):
        model(x).sum().backward()
        offloaded.step()
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.proof
def test_memory_of_the_process_grows_by_the_share_and_not_by_the_activations(
    tmp_path: Path,
) -> None:
    grown = {}
    for mode in ("keep", "nvme"):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM, os.fspath(tmp_path), mode],
            capture_output=True,
            text=True,
            check=True,
        )
        grown[mode] = int(run.stdout)
    # Saved are 30 sigmoids of 8 MiB (and their inputs, the same storages). The share of 256 MiB is
    # 32 MiB, and a few of 8 MiB are at work beside it.
    assert grown["keep"] > 230
    assert grown["nvme"] < 160
