"""A transformer that stands for a number of parameters, on the meta device.

Blocks have twelve matrices of width x width elements, as those of GPT and Llama do: four in the
attention, the others in three of a feed-forward part that is 8/3 as wide. There are 128 columns for
each block, and 128,256 rows in an embedding and in a head of its own (Llama 3), or as many as a
quarter of the parameters make of each, if that is less. Whatever is left over is a last layer.
"""

from __future__ import annotations

import math

import torch
from torch import nn

VOCABULARY = 128_256
MOST_PARAMETERS = 2 * 10**12
"""More than any model has; every tensor of so many has a size that torch can count."""
_BLOCK_MATRICES = 12
_ASPECT = 128
"""Columns for each block."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.query, self.key = _linear(width, width), _linear(width, width)
        self.value, self.out = _linear(width, width), _linear(width, width)
        self.gate, self.up = _linear(width, inner), _linear(width, inner)
        self.down = _linear(inner, width)


class Typical(nn.Module):
    """Exactly ``num_parameters``; without a forward pass."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        width = _width(num_parameters)
        rows = min(VOCABULARY, num_parameters // 4 // width)
        block = sum(p.numel() for p in _Block(width).parameters())
        blocks = (num_parameters - 2 * rows * width) // block
        if rows:
            self.embedding, self.head = _linear(width, rows), _linear(width, rows)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.rest = nn.ParameterList(
            nn.Parameter(torch.empty(part, device="meta"))
            for part in _parts(num_parameters - 2 * rows * width - blocks * block, width * width)
        )


def typical_model(num_parameters: int) -> nn.Module:
    """Raises ``ValueError`` for a number below 1 or above ``MOST_PARAMETERS``."""
    if not 1 <= num_parameters <= MOST_PARAMETERS:
        raise ValueError(
            f"number of parameters {num_parameters:,} must be between 1 and {MOST_PARAMETERS:,}; "
            "of a larger model pass the model itself, on the meta device"
        )
    return Typical(num_parameters)


def _width(num_parameters: int) -> int:
    """Columns, where blocks alone would make the number; a multiple of 64, if it is not small."""
    width = round(math.cbrt(num_parameters * _ASPECT / _BLOCK_MATRICES))
    return max(1, width // 64 * 64 if width >= 64 else width // 4)


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, device="meta")


def _parts(numel: int, most: int) -> list[int]:
    return [most] * (numel // most) + ([numel % most] if numel % most else [])
