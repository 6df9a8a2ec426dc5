"""The update on a CUDA device: both of its forms give the bits of the C kernel."""

import pytest
import torch
from hypothesis import given, settings

from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin, adam_job
from swap.device.kernels import adam, elementwise
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
)
from tests.support.examples import examples

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
    assert adam._kernel(DEVICE) is not None, "the kernel does not compile here"
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
