"""A step of Adam, and moments in 16 and 8 bits, in plain numpy.

From the description of the formulas and roundings, and not from the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from swap.adam import AdamHyper

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


def fused(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32, rounded once: the product of two is exact in double."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def adam_in_numpy(
    state: Mapping[str, torch.Tensor], hyper: AdamHyper
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(master, exp_avg, exp_avg_sq), float32, after a step from a state whose moments are float32.

    Every operation is rounded to float32, but for three multiply-adds that are rounded as wholes.
    """
    one = np.float32(1)
    weight_of_grad = np.float32(1 - hyper.beta1)
    p = join_master(state).numpy()
    g = state["grad"].float().numpy() * np.float32(hyper.grad_scale)
    m, v = (state[name].numpy() for name in ("exp_avg", "exp_avg_sq"))
    if hyper.decoupled:
        p = p * np.float32(1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        g = fused(p, np.float32(hyper.weight_decay), g)
    # From the nearer end.
    near = weight_of_grad < 0.5
    m = fused(weight_of_grad if near else weight_of_grad - one, g - m, m if near else g)
    v = fused(np.float32(1 - hyper.beta2) * g, g, v * np.float32(hyper.beta2))
    bias2_sqrt = np.float32(math.sqrt(1 - hyper.beta2**hyper.step))
    step_size = np.float32(hyper.lr / (1 - hyper.beta1**hyper.step))
    p = p - step_size * m / (np.sqrt(v) / bias2_sqrt + np.float32(hyper.eps))
    return torch.from_numpy(p), torch.from_numpy(m), torch.from_numpy(v)


def join_master(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The float32 masters of a state in any layout."""
    rest = state.get("rest", state["weight"])
    if rest.dtype == torch.float32:
        return rest
    high = state["weight"].view(torch.int16).numpy().astype(np.int32) << 16
    return torch.from_numpy((high + rest.numpy()).view(np.float32))


def split_master(master: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``master`` as the weights of ``like`` are kept; halves are nearest, ties away from zero."""
    rest = like.get("rest")
    if rest is None:
        return {"weight": master}
    if rest.dtype == torch.float32:
        return {"weight": master.to(like["weight"].dtype), "rest": master}
    bits = master.numpy().view(np.uint32)
    high = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(np.int16)
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
    return {
        "weight": torch.from_numpy(high).view(torch.bfloat16),
        "rest": torch.from_numpy(low),
    }
