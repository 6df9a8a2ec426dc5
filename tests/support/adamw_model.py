"""A small model under OffloadedAdamW, with budgets that leave its state on NVMe."""

from pathlib import Path

import torch
from torch import nn

AMPLE = "1GiB"
SMALL = 7_100_000
"""Bytes that leave most of the state of ``make_model`` on NVMe."""
SMALL_BESIDE_OTHERS = 7_400_000
"""Bytes that leave room for slots beside the state of the small layers at home."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(150, 700), nn.GELU(), nn.Linear(700, 901), nn.GELU(), nn.Linear(901, 3)
    ).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 150, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model: nn.Module, step: int) -> float:
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(batch(step, dtype)).float().square().mean()
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))
