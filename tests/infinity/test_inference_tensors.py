"""Inference mode around what a program does in the block, and models that were made in it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, first_weight, seeded, vector_loss
from tests.support.training import same_bits, values_of

WIDTH = 384
"""Of which tiles can be made."""

make = partial(Stack, WIDTH, 2)
loss_of = partial(vector_loss, width=WIDTH)


@pytest.mark.parametrize("given", [{}, {"max_parameter_bytes": 1 << 18}], ids=["whole", "tiles"])
def test_gradients_and_gathered_weights_are_read_and_changed_in_inference_mode(
    given: dict[str, Any], nvme: Path
) -> None:
    model = seeded(make)
    before = first_weight(model).detach().clone()
    with infinity.offload(model, nvme, host_memory="1GiB", **given) as offloaded:
        loss_of(model, 0).backward()
        gradient = offloaded.gradient(first_weight(model))
        assert gradient is not None
        with torch.inference_mode():
            ours = first_weight(model).grad
            assert ours is not None
            assert torch.equal(ours.norm(), gradient.norm())
            ours.mul_(0.5)
        changed = offloaded.gradient(first_weight(model))
        assert changed is not None
        assert same_bits(changed, gradient * 0.5)
        with torch.inference_mode(), offloaded.gathered(modify=True):
            first_weight(model).mul_(0.5)
            first_weight(model)[0] = 1.0
        loss_of(model, 0).backward()
        model.zero_grad()
    before *= 0.5
    before[0] = 1.0
    assert same_bits(first_weight(model).detach(), before)


@pytest.mark.parametrize("given", [{}, {"max_parameter_bytes": 1 << 18}], ids=["whole", "tiles"])
def test_a_model_from_inference_mode_is_refused_with_the_remedy(
    given: dict[str, Any], nvme: Path
) -> None:
    with torch.inference_mode():
        model = make()
    with pytest.raises(ValueError, match=r"^layers\.0\.weight was made inside .*\.clone\(\)"):
        infinity.offload(model, nvme, host_memory="1GiB", **given).__enter__()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.clone()))
    expected = values_of(model)
    with infinity.offload(model, nvme, host_memory="1GiB", **given):
        loss_of(model, 0).backward()
        model.zero_grad()
    assert all(same_bits(value, expected[name]) for name, value in values_of(model).items())
