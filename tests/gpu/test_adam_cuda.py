"""Kernels on a CUDA device: both forms of each give the bits of the C kernel."""

import pytest
import torch
from hypothesis import given, settings

from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin, adam_job
from swap.device.kernels import adam, compiled, elementwise, squares
from swap.kernels import block_squares
from tests.support.adam_steps import (
    GRADS,
    HYPER,
    LAYOUTS,
    MOMENTS,
    Step,
    assert_steps_alike,
    moved,
    steps,
    tensors_of,
    usual,
)
from tests.support.examples import examples
from tests.support.tiers import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def _back(found: AdamTensors, tensors: AdamTensors) -> None:
    for name in AdamTensors.__slots__:
        if getattr(tensors, name) is not None:
            getattr(tensors, name).copy_(getattr(found, name))


def _by_kernel(tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
    assert compiled.kernel_of(DEVICE, "adam_step") is not None, "the kernel does not compile here"
    there = moved(tensors, DEVICE)
    adam.adam_step(there, hyper, origin=origin)
    _back(there, tensors)


def _by_torch(tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
    there = moved(tensors, DEVICE)
    elementwise.step(adam_job(there, hyper, origin, device_type="cuda"), there)
    _back(there, tensors)


BOTH = pytest.mark.parametrize("step", [_by_kernel, _by_torch])


@BOTH
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_on_cuda_has_the_bits_of_the_c_kernel(
    step: Step, layout: str, grad: torch.dtype, moments: torch.dtype
) -> None:
    for wild in (False, True):
        tensors = tensors_of(layout, grad, moments, 1_000_003, seed=1, wild=wild)
        assert_steps_alike(step, tensors, HYPER, Origin(parameter=3, first=5 * MOMENT_BLOCK))


@BOTH
def test_any_step_on_cuda_has_the_bits_of_the_c_kernel(step: Step) -> None:
    @settings(max_examples=examples(300), deadline=None)
    @given(case=steps())
    def check(case: tuple[AdamTensors, AdamHyper, Origin]) -> None:
        assert_steps_alike(step, *case)

    check()


@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_sums_of_squares_on_cuda_have_the_bits_of_the_c_kernel(dtype: torch.dtype) -> None:
    assert compiled.kernel_of(DEVICE, "block_squares") is not None
    values = usual(1_000_003, dtype, 4)
    expected = block_squares(values)
    found = torch.empty_like(expected, device=DEVICE)
    squares.block_squares(values.to(DEVICE), found)
    assert same_bits(found.cpu(), expected)
    assert same_bits(squares._squares(values[:50_000].to(DEVICE)).cpu(), expected[:13])
