"""Optimizers of one's own, as programs write them, and what they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.training import same_bits

Factory = Callable[[Any], torch.optim.Optimizer]


class Scaled(torch.optim.Optimizer):
    """SGD with a ``factor`` of the rate for each parameter; ``begin`` comes before all of them."""

    def begin(self) -> None:
        pass

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=float(group["lr"]) * self.factor(p, group))


class Own(Scaled):
    """``made`` says what there is from the beginning on."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.made()

    def made(self) -> None:
        pass


class Each(torch.optim.Optimizer):
    """Calls ``one`` for every parameter that has a gradient, with its name if groups have names."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for name, p in zip(names, group["params"], strict=False):
                if p.grad is not None:
                    self.one(p, self.state[p], name)

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        pass


def linears(width: int = 24, count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def pass_back(model: nn.Module, number: int, width: int = 24) -> None:
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()


def has_bits_of_plain(
    make: Callable[[], nn.Module],
    factory: Factory,
    nvme: Path,
    *,
    host_memory: int,
    train: Callable[[nn.Module, Any], None],
) -> bool:
    """Whether ``train(model, optimizer)`` has the bits of plain torch in a block."""
    ours, plain = seeded(make), seeded(make)
    train(plain, factory(list(plain.parameters())))
    with infinity.offload(ours, nvme, optimizer=factory, host_memory=host_memory) as offloaded:
        train(ours, offloaded.optimizer)
    expected = dict(plain.named_parameters())
    return all(same_bits(p, expected[name]) for name, p in ours.named_parameters())
