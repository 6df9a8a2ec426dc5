"""The model of the benchmarks: a plain GPT, sized by width and depth."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Pre-norm attention and MLP; (batch, tokens, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens (batch, tokens) and targets in, mean cross entropy out.

    With ``recompute_rows`` blocks are computed again in the backward pass, and so is the loss, for
    so many tokens at a time: neither what is within blocks nor all logits are in memory at once.
    """

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        vocabulary: int,
        tokens: int,
        recompute_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.recompute_rows = recompute_rows
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x) if self.recompute_rows is None else _recomputed(block, x)
        rows, wanted = self.norm(x).flatten(0, 1), targets.flatten()
        if self.recompute_rows is None:
            return F.cross_entropy(self.head(rows).float(), wanted)
        parts = zip(rows.split(self.recompute_rows), wanted.split(self.recompute_rows), strict=True)
        return torch.stack([_recomputed(self._loss, *part) for part in parts]).sum() / len(wanted)

    def _loss(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(rows).float(), wanted, reduction="sum")


def _recomputed(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(
        function, *values, use_reentrant=False, preserve_rng_state=False
    )
    return result
