"""Exports of offloaded models, whose weights are read piece by piece from where they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity

WIDTH = 1100
"""Of a weight that is longer than a staging buffer (2 MiB)."""


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_weight_after_a_mask_of_odd_length_is_exported(
    nvme: Path, tmp_path: Path, compute_dtype: torch.dtype
) -> None:
    model = Masked()
    expected = model.body.weight.detach().to(compute_dtype)
    with infinity.offload(
        model, nvme, optimizer=None, host_memory="100MiB", compute_dtype=compute_dtype
    ) as offloaded:
        files = offloaded.export(tmp_path / "exported")
    tensors = load_file(files[0])
    assert tensors["mask"].tolist() == [True, False, True]
    assert torch.equal(tensors["body.weight"], expected)
