"""A run of torch's AdamW that is to go on here, and what it saves on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import infinity
from infinity.cli import main
from tests.support.models import seeded

WIDTH = 96
AT = 3
"""Steps before the state moves; as many come after."""
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.02}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


def batches() -> Iterator[torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(4, WIDTH, generator=rng)


def train(model: nn.Module, step: Callable[[], Any], data: Iterator[torch.Tensor]) -> list[float]:
    losses = []
    for _ in range(AT):
        x = next(data)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


class Plain:
    """A run of torch's AdamW: what it saved amid it, and how it went on."""

    def __init__(self, folder: Path, named: bool = True) -> None:
        self.model = seeded(Model)
        given: Any = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer = torch.optim.AdamW(given, fused=True, **OPTIONS)
        data = batches()
        train(self.model, self.step, data)
        self.weights = folder / "model.safetensors"
        save_file(self.model.state_dict(), self.weights)
        self.folder = folder

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rest(self) -> list[float]:
        return train(self.model, self.step, after(AT))


def after(count: int) -> Iterator[torch.Tensor]:
    data = batches()
    for _ in range(count):
        next(data)
    return data


def goes_on(path: Path, nvme: Path, **options: Any) -> tuple[list[float], nn.Module]:
    model = Model()
    with infinity.offload(
        model, nvme, optimizer=infinity.AdamW(**options), host_memory="256MiB"
    ) as offloaded:
        offloaded.load(path)
        return train(model, offloaded.step, after(AT)), model


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def assert_goes_on_as(plain: Plain, path: Path, nvme: Path, **options: Any) -> None:
    losses, model = goes_on(path, nvme, **options)
    assert losses == plain.rest()
    expected = plain.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def saved_by_torch(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, checkpoint_id=path)
