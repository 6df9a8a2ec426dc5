"""Saving from and loading into tensors on a CUDA device, beside what is computed there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NUMEL = 24 << 20


def _delayed(tensor: torch.Tensor, value: float) -> None:
    """Sets all elements, once the stream has done other work."""
    work = torch.ones(4096, 4096, device=tensor.device)
    for _ in range(16):
        work = work @ work / 4096
    tensor.fill_(value).add_(work[0, 0] * 0)


@pytest.mark.parametrize("has_guard", [False, True])
def test_save_has_what_a_side_stream_computes_at_the_call(tmp_path: Path, has_guard: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(NUMEL, device="cuda"))
    turned = torch.zeros(1000, 512, device="cuda").t()
    guard = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        _delayed(weight.data, 3.0)
        _delayed(turned, 5.0)
        state = {"weight": weight, "turned": turned}
        pending = checkpoint.save_async(state, tmp_path / "run", guard=guard if has_guard else None)
        if has_guard:
            guard.step()
        else:
            weight.data.fill_(-1.0)
    pending.result()
    loaded = checkpoint.load(tmp_path / "run")
    assert bool((loaded["weight"] == 3).all())
    assert bool((loaded["turned"] == 5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_into_cuda_comes_behind_what_a_side_stream_computes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = torch.randn(NUMEL)
    checkpoint.save({"x": values}, tmp_path / "run")
    live = torch.zeros(NUMEL, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _delayed(live, -1.0)
        cast = None if dtype == torch.float32 else dtype
        checkpoint.load(tmp_path / "run", into={"x": live}, dtype=cast)
        found = live.clone()
    stream.synchronize()
    assert torch.equal(found.cpu(), values.to(dtype))


def test_new_tensors_on_cuda_are_ordered_with_the_stream_of_the_caller(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(NUMEL)}, tmp_path / "run")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            scratch = torch.zeros(NUMEL, device="cuda")
            _delayed(scratch, 9.0)
            del scratch  # its memory is free, and still written to
            loaded = checkpoint.load(tmp_path / "run", map_location="cuda")["x"]
            assert bool((loaded == 1).all())


def test_conjugated_and_negated_values_of_cuda_come_back(tmp_path: Path) -> None:
    base = torch.randn(3000, dtype=torch.complex64, device="cuda")
    state = {"conj": base.conj(), "neg": base.conj().imag, "rows": base.view(30, 100)[:, ::2]}
    checkpoint.save(state, tmp_path / "run")
    loaded = checkpoint.load(tmp_path / "run")
    for name, value in state.items():
        assert torch.equal(loaded[name], value.cpu()), name
