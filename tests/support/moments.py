"""Moments in 16 and 8 bits in plain numpy, from their description and not from the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

MOMENT_BLOCK = 256
_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_words(parameter: int, step: int, first: int, n: int) -> np.ndarray[Any, Any]:
    """32 random bits for each of the elements from ``first``: a function of its arguments."""
    index = np.arange(first, first + n, dtype=np.uint64)
    x = np.empty(n, dtype=np.uint32)
    for high in np.unique(index >> np.uint64(32)):
        chosen = index >> np.uint64(32) == high
        key = mix((mix((mix(parameter) + step) & _MASK) + int(high)) & _MASK)
        part = index[chosen].astype(np.uint32) + np.uint32(key & 0xFFFFFFFF)
        part = (part ^ (part >> np.uint32(16))) * np.uint32(0x21F0AAAD)
        part = (part ^ (part >> np.uint32(15))) + np.uint32(key >> 32)
        part = part * np.uint32(0xD35A2D97)
        x[chosen] = part ^ (part >> np.uint32(15))
    return x


def round_to_bf16(values: torch.Tensor, random16: np.ndarray[Any, Any]) -> torch.Tensor:
    """``values`` (float32) in bfloat16, up with the probability of their lower 16 bits."""
    bits = values.numpy().view(np.uint32) + random16.astype(np.uint32)
    return torch.from_numpy((bits >> np.uint32(16)).astype(np.uint16).view(np.int16)).view(
        torch.bfloat16
    )


def values_of_codes(is_signed: bool) -> np.ndarray[Any, Any]:
    """What each of the 256 codes stands for, with a scale of 1."""
    levels = 127 if is_signed else 255
    # The float 1.0 is level ``levels``; three bits of mantissa make eight levels a power of two.
    steps = np.arange(levels, dtype=np.int64)[::-1]
    exponent = -np.ceil(steps / 8)
    mantissa = (8 - steps % 8) % 8
    magnitudes = np.concatenate([[0.0], (1 + mantissa / 8) * 2.0**exponent]).astype(np.float32)
    return np.concatenate([magnitudes, -magnitudes]) if is_signed else magnitudes


def decode_blocks(codes: torch.Tensor, scales: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    table = values_of_codes(is_signed)
    per_element = np.repeat(scales.numpy(), MOMENT_BLOCK)[: codes.numel()]
    return torch.from_numpy(table[codes.numpy()] * per_element)


def encode_blocks(
    values: torch.Tensor, random16: np.ndarray[Any, Any], *, is_signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of finite ``values``: between its two neighbours in the table each value
    goes up if the random bits are less than its part of the way, in units of 2^-16.
    """
    n = values.numel()
    table = values_of_codes(is_signed)
    magnitudes = table[: 128 if is_signed else 256].astype(np.float64)
    blocks = -(-n // MOMENT_BLOCK)
    padded = np.zeros(blocks * MOMENT_BLOCK, dtype=np.float32)
    padded[:n] = values.numpy()
    scales = np.abs(padded.reshape(blocks, MOMENT_BLOCK)).max(1)
    by = np.repeat(np.where(scales > 0, scales, np.float32(1)), MOMENT_BLOCK)
    part = (np.abs(padded) / by)[:n].astype(np.float64)
    low = np.searchsorted(magnitudes, part, side="right") - 1
    above = magnitudes[np.minimum(low + 1, len(magnitudes) - 1)] - magnitudes[low]
    way = np.where(above > 0, (part - magnitudes[low]) / np.where(above > 0, above, 1), 0.0)
    # A float between two codes has 20 bits beyond them, of which 16 are made to matter.
    threshold = np.floor(way * 2.0**20) + random16.astype(np.float64) * 16
    up = np.where(low > 0, threshold >= 2.0**20, part * 2.0**16 > random16 * magnitudes[1])
    code = low + np.where(low == len(magnitudes) - 1, 0, up)
    if is_signed:
        code = code | np.where(np.signbit(values.numpy()), 128, 0)
    else:
        code = np.maximum(code, part > 0)
    return torch.from_numpy(code.astype(np.uint8)), torch.from_numpy(scales)
