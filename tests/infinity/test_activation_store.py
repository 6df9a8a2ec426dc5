"""Activations on NVMe and in host memory: what is written, read, shared, counted and let go."""

import errno
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from aio import AioError
from infinity.activations import storage as saved_storage
from infinity.activations.host import HostActivations
from infinity.activations.offloading import THRESHOLD_BYTES
from infinity.activations.storage import SavedActivation
from infinity.activations.tiers import (
    ActivationShare,
    NvmeActivations,
    activations_for,
    mode_of,
)
from swap.timeline import Timeline
from tests.support.activations import (
    CPU,
    KIB,
    MIB,
    Hooks,
    Make,
    chain,
    fail_io,
    gradient_of,
    large,
    wait_for_writes,
)
from tests.support.examples import examples
from tests.support.training import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


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

    def record(volume: Any, storage: Any, memory: Any, *, urgent: bool) -> None:
        asked.append(urgent)
        start_read(volume, storage, memory, urgent=urgent)

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


class _Product(torch.autograd.Function):
    """Of three tensors, which backward takes all at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0] * tensors[1] * tensors[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b, c = ctx.saved_tensors
        return gradients[0] * b * c, gradients[0] * a * c, gradients[0] * a * b


def test_storage_larger_than_the_budget_is_read_once_for_all_who_need_it_at_once(
    on_nvme: Make, timeline: Timeline
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(*(x * 2).view(3, -1))
        return torch.sigmoid(product)

    x = large(0, 3 * 512 * KIB)
    expected = gradient_of(function, x)
    activations = on_nvme(1 * MIB)
    with Hooks(activations):
        assert torch.equal(gradient_of(function, x), expected)
    assert timeline.nbytes["read"] == 3 * 512 * KIB
    gc.collect()
    assert activations.counts()["in host"] == 0


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
    del tensor
    with Hooks(activations):
        gradient_of(partial(chain, length=20), large(0, MIB))  # is not told, and written
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


def test_io_errors_are_raised_and_the_next_call_tries_again(
    on_nvme: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_io(monkeypatch, 0.3)
    activations = on_nvme(1 * MIB)
    saved, failures = [], 0
    for seed in range(12):
        handle, tensor = None, large(seed).detach()
        while handle is None:
            try:
                handle = activations.save(tensor)
            except AioError as error:
                failures += error.errno == errno.EIO
        saved.append(handle)
    for seed, handle in [*enumerate(saved)][::-1]:
        found = None
        while found is None:
            try:
                found = activations.restore(handle)
            except AioError as error:
                failures += error.errno == errno.EIO
        assert torch.equal(found, large(seed).detach())
    assert failures > 3


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
            base = base.view(data.draw(st.sampled_from(DTYPES)))
            view = base[data.draw(st.integers(0, 3)) :: data.draw(st.integers(1, 3))]
            saved = activations.save(view)
            assert saved is not None
            live.append((saved, view.clone()))
        elif action == "restore" and live:
            position = data.draw(st.integers(0, len(live) - 1))
            assert same_bits(activations.restore(live[position][0]), live[position][1])
        elif action == "drop" and live:
            live.pop(data.draw(st.integers(0, len(live) - 1)))
        elif action == "forget" and bases:
            bases.pop(data.draw(st.integers(0, len(bases) - 1)))
        assert activations.counts()["in host"] <= activations.budget_bytes
    while live:
        saved, expected = live.pop()
        assert same_bits(activations.restore(saved), expected)
