"""Guarded saves with a step right behind each: what is stored are the values of the moment of the
call, and a tensor that changes all the same is an error that names it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.transfer.filling import Filler
from tests.support.held import Held

MIB = 1 << 20
PAGE = 4096


def aligned(num_bytes: int, offset: int = 0) -> torch.Tensor:
    """Bytes whose address is `offset` behind the beginning of a page."""
    memory = mmap.mmap(-1, num_bytes + PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + num_bytes]


def weight_of(num_bytes: int, offset: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(aligned(num_bytes, offset).view(torch.float32).zero_())


def make_stripes(folder: Path, count: int) -> list[Path] | None:
    stripes = [folder / f"ssd{k}" for k in range(count)] if count > 1 else []
    for stripe in stripes:
        stripe.mkdir()
    return stripes or None


@pytest.mark.parametrize("num_stripes", [1, 4])
@pytest.mark.parametrize("offset", [0, 4], ids=["page-aligned", "unaligned"])
def test_a_step_right_behind_a_guarded_save_leaves_what_was_there_at_the_call(
    tmp_path: Path, offset: int, num_stripes: int
) -> None:
    stripes = make_stripes(tmp_path, num_stripes)
    weight = weight_of(24 * MIB, offset)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full_like(weight, -1.0)
    for step in range(6):
        pending = checkpoint.save_async({"w": weight}, tmp_path / "run", stripes, guard=optimizer)
        optimizer.step()
        pending.result()
        loaded = checkpoint.load(tmp_path / "run")["w"]
        assert bool((loaded == step).all()), step
    assert bool((weight == 6).all())


def test_memory_that_changes_while_it_is_written_is_an_error_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the back of torch, once it was summed and the device had been given it."""
    check = Filler.check_direct

    def change(self: Filler, run: Any, before: int) -> None:
        tensor.numpy()[:] = 7
        check(self, run, before)

    tensor = aligned(24 * MIB).view(torch.float32).zero_()
    checkpoint.save({"x": tensor}, tmp_path / "run")
    before = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Filler, "check_direct", change)
        with pytest.raises(checkpoint.ChangedTensorError, match=r"'x' was changed") as caught:
            checkpoint.save({"x": tensor}, tmp_path / "run")
    assert caught.value.tensor == "x"
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == before
    assert not checkpoint.load(tmp_path / "run")["x"].any()


def test_running_averages_are_saved_as_they_were_at_the_call(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reading = Held()
    array = np.zeros(3)
    state = {"source": reading, "model": model.state_dict(), "array": array}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pending = checkpoint.save_async(state, tmp_path / "step", guard=optimizer)
    model(torch.randn(16, 8))  # in training, this changes buffers
    array[:] = 1
    reading.opened.set()
    pending.result()
    loaded = checkpoint.load(tmp_path / "step")
    for name, value in expected.items():
        assert torch.equal(loaded["model"][name], value), name
    assert not loaded["array"].any()


def test_an_embedding_that_renormalises_itself_while_it_is_saved_is_an_error_with_its_name(
    tmp_path: Path,
) -> None:
    embedding = torch.nn.Embedding(64, 16, max_norm=0.5)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    checkpoint.save({"model": {"weight": torch.zeros(3)}}, tmp_path / "step")
    reading = Held()
    state = {"model": embedding.state_dict(keep_vars=True), "source": reading}
    pending = checkpoint.save_async(state, tmp_path / "step", guard=optimizer)
    assert reading.reached.wait(60)
    embedding(torch.arange(64))
    reading.opened.set()
    with pytest.raises(checkpoint.ChangedTensorError, match=r"'model.weight' was changed"):
        pending.result()
    assert not checkpoint.load(tmp_path / "step")["model"]["weight"].any()


@pytest.mark.parametrize("staging_bytes", [None, MIB], ids=["whole", "waves"])
def test_a_tensor_that_another_thread_changes_while_it_is_copied_is_an_error(
    tmp_path: Path, staging_bytes: int | None
) -> None:
    tensor = torch.zeros(MIB)
    checkpoint.save({"x": 1}, tmp_path / "step")
    state = {"tensor": tensor, "source": Changing(tensor)}
    with pytest.raises(checkpoint.ChangedTensorError, match="'tensor'"):
        checkpoint.save_async(state, tmp_path / "step", staging_bytes=staging_bytes).result()
    assert checkpoint.load(tmp_path / "step") == {"x": 1}
    with pytest.raises(checkpoint.ChangedTensorError, match="'tensor'"):
        checkpoint.save(state, tmp_path / "step")
    assert checkpoint.load(tmp_path / "step") == {"x": 1}


class Changing:
    """A source whose reading changes a tensor."""

    dtype = torch.uint8
    shape = (4,)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self, start: int, out: memoryview) -> None:
        self._tensor += 1
        out[:] = bytes(len(out))


class _Wrapper(torch.optim.Optimizer):
    """An optimizer by type that has no hooks of its own, as accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapper_without_hooks_is_refused_as_a_guard_with_the_optimizer_to_give(
    tmp_path: Path,
) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    wrapper = _Wrapper(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(TypeError, match=r"_Wrapper takes no hook.*guard=optimizer\.optimizer"):
        checkpoint.save_async({"w": weight}, tmp_path / "run", guard=wrapper)
    checkpoint.save_async({"w": weight}, tmp_path / "run", guard=wrapper.optimizer).result()


class _Elsewhere(torch.nn.Parameter):
    """A parameter of the guard that gets its values from elsewhere for whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_parameters_of_the_guard_that_are_elsewhere_are_not_asked_where_they_lie(
    tmp_path: Path,
) -> None:
    """Neither as parameters nor as state of the optimizer; what is in memory is saved as ever."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    elsewhere = torch.Tensor._make_subclass(_Elsewhere, torch.ones(4))
    optimizer.param_groups[0]["params"].append(elsewhere)
    optimizer.state[weight] = {"average": elsewhere}
    mean = torch.zeros(4)
    pending = checkpoint.save_async({"w": weight, "m": mean}, tmp_path / "run", guard=optimizer)
    mean += 1
    pending.result()
    loaded = checkpoint.load(tmp_path / "run")
    assert bool((loaded["w"] == 1).all())
    assert bool((loaded["m"] == 0).all())


@pytest.mark.parametrize("shape", [(1, 3), (0, 3)])
def test_a_column_of_one_row_or_of_none_is_copied(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """It is contiguous whatever its stride is."""
    weight = torch.nn.Parameter(torch.ones(4))
    column = torch.ones(shape)[:, 0]
    guard = torch.optim.SGD([weight], lr=1.0)
    pending = checkpoint.save_async({"w": weight, "c": column}, tmp_path / "run", guard=guard)
    column += 1
    pending.result()
    loaded = checkpoint.load(tmp_path / "run")["c"]
    assert loaded.tolist() == [1.0] * shape[0]


@pytest.mark.parametrize(
    "empty",
    [
        torch.zeros(2, 0, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2, 0)),
        torch._efficientzerotensor((2, 0)),
    ],
    ids=["conjugated", "negated", "zeros"],
)
def test_empty_tensors_whose_values_are_not_their_memory_are_copied(
    tmp_path: Path, empty: torch.Tensor
) -> None:
    """As those on a device are, of which torch makes the same source."""
    weight = torch.nn.Parameter(torch.ones(4))
    guard = torch.optim.SGD([weight], lr=1.0)
    checkpoint.save_async({"w": weight, "e": empty}, tmp_path / "run", guard=guard).result()
    assert checkpoint.load(tmp_path / "run")["e"].shape == (2, 0)
