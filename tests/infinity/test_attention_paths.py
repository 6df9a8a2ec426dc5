"""Which of its kernels torch's attention takes does not depend on the budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget


class Attention(nn.Module):
    """Looks at the weights of a child module before it decides how to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(128, 4, batch_first=True) for _ in "1234")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x, x, x)
        return x


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    native = torch._native_multi_head_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return native(*args, **kwargs)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    return calls


@pytest.mark.parametrize("part", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_attention_takes_its_native_kernel_under_every_budget(
    part: float, nvme: Path, native_calls: list[int]
) -> None:
    model = seeded(Attention).eval()
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
    least = least_budget(Attention, nvme, optimizer=None)
    host_memory = WHOLE if part == 1.0 else least + int(part * 1e6)
    with (
        infinity.offload(model, nvme, optimizer=None, host_memory=host_memory),
        torch.no_grad(),
    ):
        assert torch.equal(model(x), expected)
    assert len(native_calls) == 8
