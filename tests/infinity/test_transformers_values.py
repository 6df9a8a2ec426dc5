"""Models of Hugging Face on the meta device get the first values that they get in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: pip install .[examples]")

import infinity
from tests.support.architectures import ARCHITECTURES
from tests.support.training import same_bits

ONLY_IN_CONSTRUCTORS = {"clip": "logit_scale"}
"""Parameters to which only the constructor gives a value, lost on meta: refused by name."""


def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return ARCHITECTURES[name]()


def _initialised(model: nn.Module, nvme: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    with (
        infinity.offload(model, nvme, optimizer=None, host_memory="64MiB") as offloaded,
        offloaded.gathered(),
    ):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: value.detach().clone() for name, value in named}


def _assert_drawn_alike(name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits where no chance is in it; else the same spread, and the same zeros."""
    if same_bits(value, expected):
        return
    assert value.shape == expected.shape
    assert expected.std() > 0, f"{name} is no matter of chance"
    assert torch.equal(value == 0, expected == 0), f"zeros of {name}"
    error = 5 / (2 * value.numel()) ** 0.5  # five standard errors of a standard deviation
    assert value.std().item() == pytest.approx(expected.std().item(), rel=error), name
    bound = 10 * expected.std() / value.numel() ** 0.5
    assert abs(value.mean() - expected.mean()) < bound, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_on_meta_is_initialised_as_in_memory(name: str, nvme: Path) -> None:
    torch.manual_seed(1)
    plain = ARCHITECTURES[name]()
    model = _on_meta(name)
    lost = ONLY_IN_CONSTRUCTORS.get(name)
    if lost is not None:
        with pytest.raises(ValueError, match=rf"{lost} is on the meta device and has no .* before"):
            _initialised(model, nvme)
        setattr(model, lost, nn.Parameter(plain.get_parameter(lost).detach().clone()))
    found = _initialised(model, nvme)
    named = dict([*plain.named_parameters(), *plain.named_buffers()])
    assert found.keys() == named.keys()
    for key, expected in named.items():
        _assert_drawn_alike(key, found[key], expected.detach())
