"""What a parameter on the meta device has beside its attributes stays on it in the block and
after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import infinity
from infinity.parameters.offloaded.parameter import take_grad
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE


@pytest.fixture
def meta(tmp_path: Path) -> Stack:
    """A model on meta; its weights are in a file."""
    save_file(seeded(Stack).state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        return Stack()


def test_hooks_on_meta_parameters_are_called(meta: Stack, nvme: Path, tmp_path: Path) -> None:
    calls: list[str] = []

    def silence(gradient: torch.Tensor) -> torch.Tensor:
        calls.append("hook")
        return gradient * 0

    weight = meta.layer(0).weight
    weight.register_hook(silence)
    handle = weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    file = tmp_path / "weights.safetensors"
    with infinity.offload(meta, nvme, weights=file, host_memory=WHOLE) as offloaded:
        vector_loss(meta, 0).backward()
        gradient = offloaded.gradient(weight)
        assert calls == ["hook", "after"]
        handle.remove()
        vector_loss(meta, 0).backward()
        assert calls == ["hook", "after", "hook"]
    assert gradient is not None
    assert not gradient.any()


def test_hooks_on_meta_parameters_are_called_after_the_block(meta: Stack, nvme: Path) -> None:
    calls = []
    weight = meta.layer(0).weight
    weight.register_hook(lambda _: calls.append("hook"))
    with infinity.offload(meta, nvme, host_memory=WHOLE):
        pass
    assert weight.is_meta
    weight.sum().backward()
    assert calls == ["hook"]


def test_the_dtype_of_gradients_of_meta_parameters_is_kept(meta: Stack, nvme: Path) -> None:
    weight: Any = meta.layer(0).weight
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch has gradients of the dtype of the parameter alone")
    weight.grad_dtype = torch.float64
    with infinity.offload(meta, nvme, optimizer=None, host_memory=WHOLE):
        assert weight.grad_dtype == torch.float64
    assert weight.grad_dtype == torch.float64


def test_gradients_of_a_meta_model_leave_host_memory_in_each_of_its_blocks(
    meta: Stack, nvme: Path, tmp_path: Path
) -> None:
    file = tmp_path / "weights.safetensors"
    for _ in range(3):
        with infinity.offload(meta, nvme, weights=file, host_memory=WHOLE) as offloaded:
            vector_loss(meta, 0).backward()
            assert all(take_grad(each) is None for each in meta.parameters())
            offloaded.step()
