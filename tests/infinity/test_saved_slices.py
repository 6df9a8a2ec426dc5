"""Activations that are slices of something larger come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swap.timeline import Timeline
from tests.support.activations import KIB, MIB, Hooks, Make, chain, large

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["slot", "expanded", "turned"])
@pytest.mark.parametrize("slots", [2, 3, 9])
def test_slots_of_a_buffer_that_numpy_fills_one_after_the_other_come_back_as_filled(
    slots: int, kind: str, on_nvme: Make, timeline: Timeline
) -> None:
    memory = np.zeros((slots, 256 * KIB), dtype=np.float32)
    buffer, scale = torch.from_numpy(memory), torch.ones(1, requires_grad=True)
    other = large(1, 4 * MIB)
    with Hooks(on_nvme(4 * MIB)):
        products = []
        for number, slot in enumerate(buffer):
            memory[number] = number + 1
            saved = slot.view(512, 512)
            saved = {"slot": saved, "expanded": saved.expand(4, 512, 512), "turned": saved.t()}[
                kind
            ]
            products.append((saved * scale).mean() + 0 * chain(other, 3).sum())
        (found,) = torch.autograd.grad(torch.stack(products).sum(), scale)
    assert found == sum(range(slots + 1))
    assert timeline.nbytes["write"]
