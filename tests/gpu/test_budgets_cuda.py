"""Budgets beside what torch's allocator and the kernel counted."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infinity
from tests.support.device_runs import LR, Case, block_of, budgets, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
_ROUNDING = 2 << 20
"""Bytes by which the allocator may count more than was asked for, and a gradient or two."""


def _beside_weights(case: Case) -> int:
    """The most that a step has on the device beside all weights, which stay there: activations and
    gradients. Gradients are freed as they come, as those of offloaded parameters are.
    """
    model = case.model("cuda").to(case.dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    case.loss(model, 0).backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.loss(model, 1).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", ["least", "tight"])
def test_device_memory_is_held_beside_activations(name: str, tmp_path: Path) -> None:
    case = Case(device="cuda", clip=0.5)
    beside = _beside_weights(case)
    memory = budgets(case, tmp_path)[name]
    model = case.model()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with block_of(case, model, tmp_path, memory) as offloaded:
        for step in range(case.steps):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            offloaded.backward(case.loss(model, step))
            offloaded.step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            assert peak <= memory["device_memory"] + beside + _ROUNDING
        assert offloaded.report().peak_host_bytes <= memory["host_memory"]


def test_device_memory_is_given_back_with_the_block(tmp_path: Path) -> None:
    case = Case(device="cuda", steps=2)
    held = []
    for _ in range(3):
        with block_of(case, case.model(), tmp_path, budgets(case, tmp_path)["tight"]) as offloaded:
            train(case, offloaded, range(case.steps))
        del offloaded
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[2] <= held[0]


def test_default_device_is_where_parameters_and_gradients_are(tmp_path: Path) -> None:
    case = replace(Case(device="cuda", steps=1), dtype=torch.float32)
    model = case.model()
    with infinity.offload(
        model, tmp_path, optimizer=infinity.AdamW(lr=LR), host_memory="2GiB"
    ) as offloaded:
        weight = model.blocks[0].get_parameter("up.weight")
        assert weight.device == torch.device("cuda", torch.cuda.current_device())
        case.loss(model, 0).backward()
        gradient = offloaded.gradient(weight)
        assert gradient is not None
        assert torch.isfinite(gradient).all()
