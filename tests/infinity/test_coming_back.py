"""What a model is outside of the block, beside its values, comes back: strides, attributes."""

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.training import same_bits


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strides_of_weights_come_back(device: str, nvme: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(6, 4, bias=False))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[1].weight = nn.Parameter(torch.randn(6, 4).t())
    if device == "meta":
        model.to("meta")
    strides = [parameter.stride() for parameter in model.parameters()]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with infinity.offload(model, nvme):
        pass
    assert [parameter.stride() for parameter in model.parameters()] == strides
    if device == "cpu":
        after = [parameter.detach() for parameter in model.parameters()]
        assert all(same_bits(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attributes_of_parameters_are_there_inside_and_after(device: str, nvme: Path) -> None:
    model = nn.Linear(8, 8, device=device)
    model.weight._no_weight_decay = True  # type: ignore[attr-defined]
    kept = model.weight
    with infinity.offload(model, nvme, optimizer=_by_attribute) as offloaded:
        assert model.weight._no_weight_decay  # type: ignore[attr-defined]
        decays = [group["weight_decay"] for group in offloaded.optimizer.param_groups]
        assert decays == [0.0, 0.1]
    assert model.weight is kept
    assert vars(model.weight) == {"_no_weight_decay": True}


def _by_attribute(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    exempt = [p for p in parameters if hasattr(p, "_no_weight_decay")]
    others = [p for p in parameters if not hasattr(p, "_no_weight_decay")]
    groups = [{"params": exempt, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups)
