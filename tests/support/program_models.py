"""The model that programs are about, and a handle for training it in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 160
DEPTH = 18
TOKENS = 128


class Mixed(nn.Module):
    """Tied embedding and head, every third layer frozen, layers recomputed in both ways, one with a
    parametrization, one weight by its complex view, one used twice, and buffers that count.
    """

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        parametrizations.weight_norm(self.layers[7])
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH) / 12)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        for layer in self.layers[::3]:
            layer.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number % 5 == 4:
                x = x + checkpoint(layer, x, use_reentrant=number % 2 == 0)
            else:
                x = x + torch.tanh(layer(x))
        turned = torch.view_as_complex(
            x.float().view(*x.shape[:-1], -1, 2)
        ) * torch.view_as_complex(self.rotation.float().view(WIDTH, -1, 2)).conj().sum(0)
        x = self.norm(torch.view_as_real(turned).flatten(-2).to(x.dtype))
        weight = self.layers[1].weight
        assert isinstance(weight, torch.Tensor)
        x = x + x @ weight.t().to(x.dtype)
        logits: torch.Tensor = self.head(x)
        return logits


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, TOKENS, (6,), generator=torch.Generator().manual_seed(number))


class Handle(Protocol):
    """What programs use of ``infinity.OffloadedModel``."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def step(self) -> None: ...
    def backward(self, loss: torch.Tensor) -> None: ...
    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None: ...
    def gathered(
        self, params: Any = None, modify: bool = False
    ) -> AbstractContextManager[None]: ...
    def save(self, path: Path, block: bool = True) -> Any: ...
    def load(self, path: Path) -> Any: ...
    def export(self, folder: Path) -> Any: ...


class PlainHandle:
    """The same of a model that is trained in memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.optimizer = optimizer
        self._saved: tuple[Any, Any, torch.Tensor] | None = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    @contextmanager
    def gathered(self, params: Any = None, modify: bool = False) -> Iterator[None]:
        chosen = [*self._model.parameters()] if params is None else params
        before = [parameter.detach().clone() for parameter in chosen]
        yield
        if not modify:
            with torch.no_grad():
                for parameter, values in zip(chosen, before, strict=True):
                    parameter.copy_(values)

    def save(self, path: Path, block: bool = True) -> Any:
        path.mkdir(exist_ok=True)
        states = (self._model.state_dict(), self.optimizer.state_dict())
        self._saved = copy.deepcopy((*states, torch.get_rng_state()))

    def load(self, path: Path) -> Any:
        assert self._saved is not None
        model, optimizer, random = copy.deepcopy(self._saved)
        self._model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)
        self.optimizer.zero_grad()

    def export(self, folder: Path) -> Any:
        return None
