"""Guarded saves with a step right behind each: what is stored are the values of the moment of the
call, and a tensor that changes all the same is an error that names it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import checkpoint

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


class _Twice:
    """A source that changes the tensor before it when it is read, once all of that is in flight."""

    dtype = torch.uint8
    shape = (2 * MIB,)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = tensor.detach().numpy()

    def read(self, start: int, out: memoryview) -> None:
        self._memory[:] = 7


def test_memory_that_changes_while_it_is_written_is_an_error_and_the_checkpoint_before_stays(
    tmp_path: Path,
) -> None:
    tensor = aligned(24 * MIB).view(torch.float32).zero_()
    checkpoint.save({"x": tensor}, tmp_path / "run")
    before = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    with pytest.raises(checkpoint.ChangedTensorError, match=r"'x' was changed") as caught:
        checkpoint.save({"x": tensor, "y": _Twice(tensor)}, tmp_path / "run")
    assert caught.value.tensor == "x"
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == before
    assert not checkpoint.load(tmp_path / "run")["x"].any()
