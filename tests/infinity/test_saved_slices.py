"""Activations that are slices of something larger: what of it is saved, and what comes back."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from swap.timeline import Timeline
from tests.support.activations import KIB, MIB, Hooks, Make, chain, gradient_of, large

pytestmark = pytest.mark.usefixtures("one_thread")


def _squares(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each slice is a batch, which the product saves."""
    return torch.stack([(part * scale).sum() for part in data]).sum()


def test_slices_of_a_large_tensor_are_saved_and_not_all_of_it(
    on_nvme: Make, timeline: Timeline
) -> None:
    data = torch.randn(32, 256 * KIB)
    scale = torch.ones(1, requires_grad=True)
    activations = on_nvme(4 * MIB)
    with Hooks(activations):
        gradient = gradient_of(partial(_squares, data[8:14]), scale)
    assert gradient.allclose(data[8:14].sum(), rtol=1e-3)
    assert timeline.nbytes["write"] <= 7 * MIB
    assert timeline.nbytes["read"] <= 7 * MIB
    assert activations.peak_bytes <= 4 * MIB


@pytest.mark.parametrize("slots", [2, 3, 9])
def test_slots_of_a_buffer_that_numpy_fills_one_after_the_other_come_back_as_filled(
    slots: int, on_nvme: Make, timeline: Timeline
) -> None:
    memory = np.zeros((slots, 256 * KIB), dtype=np.float32)
    buffer, scale = torch.from_numpy(memory), torch.ones(1, requires_grad=True)
    other = large(1, 4 * MIB)
    with Hooks(on_nvme(4 * MIB)):
        products = []
        for number, slot in enumerate(buffer):
            memory[number] = number + 1
            products.append((slot * scale).mean() + 0 * chain(other, 3).sum())
        (found,) = torch.autograd.grad(torch.stack(products).sum(), scale)
    assert found == sum(range(slots + 1))
    assert timeline.nbytes["write"]
