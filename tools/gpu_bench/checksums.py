"""A number that tells two sets of weights apart, computed where they are."""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 16 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32}
_PRIME = 65521


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """Of the bits and their places. Sums of integers, so in any order, on any device, the same."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.dtype.itemsize])
    plain = weighted = 0
    for number, part in enumerate(bits.split(_CHUNK_ELEMENTS)):
        wide = part.to(torch.int64)
        places = torch.arange(len(wide), device=wide.device) % _PRIME + 1 + number
        plain += int(wide.sum())
        weighted += int((wide * places).sum())
    return f"{plain & (1 << 64) - 1:016x}{weighted & (1 << 64) - 1:016x}"
