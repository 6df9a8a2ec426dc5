"""A small language model most of whose parameters are one table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models import Block

WORDS, WIDTH = 16_000, 256
TABLE_BYTES = WORDS * WIDTH * 4
TILE = 1 << 20


class Words(nn.Module):
    """Logits (batch, length, words) for tokens (batch, length)."""

    def __init__(self, *, tied: bool = True, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.blocks = nn.ModuleList([Block(width, 0.0)])
        self.head = nn.Linear(width, words if tied else 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks[0](self.embedding(tokens)))
        return logits


def tokens_of(step: int, words: int = WORDS) -> torch.Tensor:
    """Some of them several times."""
    drawn = torch.randint(0, words, (2, 12), generator=torch.Generator().manual_seed(step))
    drawn[:, -3:] = drawn[:, :3]
    return drawn


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """What ``train`` of ``tests.support.training`` takes."""
    tokens = tokens_of(step)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten() % logits.shape[-1])
