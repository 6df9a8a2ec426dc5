"""A model that keeps views of its weights, and what makes these change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.models import Stack, vector_loss

REFUSED = r"view of layers\.0\.weight.*take it anew"


class Keeping(Stack):
    """Keeps what ``take`` makes of its first weight in forward, of that layer or of its own."""

    def __init__(self, take: Callable[[Any], Any], *, within: bool) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self._take = take
        if within:
            self.layer(0).register_forward_hook(lambda layer, *_: self._keep(layer))
        self._within = within

    def _keep(self, layer: Any) -> None:
        if not self.kept:
            self.kept.append(self._take(layer.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self._within:
            self._keep(self.layers[0])
        return y


def take_step(offloaded: Any, model: Any, folder: Path) -> None:
    vector_loss(model, 1).backward()
    offloaded.step()


def load(offloaded: Any, model: Any, folder: Path) -> None:
    offloaded.save(folder / "saved")
    offloaded.load(folder / "saved")
