"""Small models that use what real ones use; each has enough weights that a tight budget moves them.

A parameter of up to 16384 elements never leaves memory, and a model is moved at all only when its
whole state is larger than the least that any budget has to hold, some 8 MiB. The models here have
half a million to a million parameters, most of them in matrices that move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256
Recompute = Literal["no", "reentrant", "non-reentrant"]
Model = TypeVar("Model", bound=nn.Module)


def make_tied() -> Any:
    """A table of 1000 rows, tied to a head with a bias, and a layer between."""
    model = nn.Sequential(nn.Embedding(1000, 300), nn.Linear(300, 300), nn.Linear(300, 1000))
    model[2].weight = model[0].weight
    return model


class Block(nn.Module):
    """A transformer block: attention and a feed-forward part around two norms."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Gpt(nn.Module):
    """Logits (batch, length, vocabulary) for token ids (batch, length)."""

    def __init__(
        self,
        *,
        width: int = 128,
        depth: int = 4,
        tied: bool = True,
        dropout: float = 0.0,
        recompute: Recompute = "no",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute == "no" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Zoo(nn.Module):
    """One of each: embedding, convolution, norms, LSTM, attention, dropout, loose parameters."""

    def __init__(self, width: int = 112) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.bilinear = nn.Parameter(torch.randn(width, 2 * width) / width)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.batch_norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        x = x + self.lstm(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.encoder(self.dropout(x))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        logits: torch.Tensor = self.head(x @ self.bilinear) * self.temperature
        return logits


class Stack(nn.Module):
    """Residual layers of one width; what is between them does not matter."""

    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def layer(self, index: int) -> nn.Linear:
        """One of ``layers``, as what it is."""
        layer = self.layers[index]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        result: torch.Tensor = self.norm(x)
        return result


class Repeated(nn.Module):
    """Every layer is used twice in a pass, once forwards and once in another place."""

    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = x + torch.tanh(layer(x))
        return x


class Routed(nn.Module):
    """A mixture of experts: the input's own values choose two of eight in each layer."""

    def __init__(self, width: int = 144, depth: int = 4, experts: int = 8) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(depth))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(experts)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            scores = router(x.mean(0))
            chosen = scores.topk(2)
            weights = chosen.values.softmax(0)
            assert isinstance(experts, nn.ModuleList)
            parts = [
                weight * experts[int(index)](x)
                for weight, index in zip(weights, chosen.indices, strict=True)
            ]
            x = x + torch.tanh(sum(parts, torch.zeros_like(x)))
        return x


LowGpt = partial(Gpt, width=176, depth=2)
LowStack = partial(Stack, width=360, depth=6)
"""As many bytes as those have, in half as many parameters: a step takes half as long."""


def seeded(make: Callable[[], Model], seed: int = 0) -> Model:
    """``make()`` with weights that depend on ``seed`` alone; the generator's state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def is_in_tiles(module: nn.Module) -> bool:
    """Whether a parameter of it is in tiles now."""
    return isinstance(module._modules.get("tiles"), nn.ModuleList)


def tokens(step: int, *, batch: int = 4, length: int = 12) -> torch.Tensor:
    """Token ids (batch, length + 1) that depend on ``step`` alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)


def vectors(step: int, *, batch: int = 8, width: int = 256) -> torch.Tensor:
    """Float32 inputs (batch, width) that depend on ``step`` alone."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(1000 + step))


def token_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Next-token cross entropy, float32, of a model from token ids to logits."""
    batch = tokens(step)
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def vector_loss(model: nn.Module, step: int, *, width: int = 256) -> torch.Tensor:
    """Mean square, float32, of what a model makes of ``vectors``."""
    result: torch.Tensor = model(vectors(step, width=width)).float().square().mean()
    return result


low_vector_loss = partial(vector_loss, width=360)
"""For ``LowStack``."""


def first_weight(model: nn.Module) -> torch.Tensor:
    """Of the first layer of a stack, whole or in tiles."""
    layers: Any = model.get_submodule("layers")
    weight: torch.Tensor = layers[0].weight
    return weight
