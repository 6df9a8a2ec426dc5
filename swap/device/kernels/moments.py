"""Moments in float32, in 16 and in 8 bits, as floats and back: ``csrc/moments_impl.h`` by
operations of torch, see there for the codes and for where the random bits come from.
"""

from __future__ import annotations

from typing import Protocol

import torch

from swap._native import lib
from swap.adam import MOMENT_BLOCK, AdamTensors
from swap.device.kernels.bits import bits_of, floats_of, one_nan, shift_right, signed

SIGNED_BIAS = 1016 - 127
UNSIGNED_BIAS = 1016 - 255
CODE_SHIFT = 20
_MASK64 = (1 << 64) - 1
_LAST_BF16 = 0x7F7F
_INFINITY = 0x7F800000


class Moments(Protocol):
    """How both moments of a step are kept. ``part`` are elements of the arrays; an array of scales
    is that of whole arrays.
    """

    def load(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """exp_avg and exp_avg_sq as floats, to be read only."""

    def store(
        self, part: slice, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, random: Random
    ) -> None:
        """Keep what became of them."""


class Random:
    """32 random bits for each element: a function of parameter, step and element."""

    def __init__(self, parameter: int, step: int, first: int) -> None:
        self._base = mix(mix(parameter) + step)
        self._first = first

    def words(self, part: slice, device: torch.device) -> torch.Tensor:
        """Those of the elements ``part``, whose indices share their upper 32 bits."""
        index = self._first + part.start
        key = mix(self._base + (index >> 32))
        x = torch.arange(part.stop - part.start, dtype=torch.int32, device=device)
        x += signed(index + key)
        x ^= shift_right(x, 16)
        x *= signed(0x21F0AAAD)
        x ^= shift_right(x, 15)
        x += signed(key >> 32)
        x *= signed(0xD35A2D97)
        x ^= shift_right(x, 15)
        return x


def mix(x: int) -> int:
    """SplitMix64's mixing of a counter."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class FloatMoments:
    """Kept as they are."""

    def __init__(self, tensors: AdamTensors) -> None:
        self._arrays = tensors.exp_avg, tensors.exp_avg_sq

    def load(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        exp_avg, exp_avg_sq = self._arrays
        return exp_avg[part], exp_avg_sq[part]

    def store(
        self, part: slice, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, random: Random
    ) -> None:
        for array, values in zip(self._arrays, (exp_avg, exp_avg_sq), strict=True):
            array[part].copy_(values)


class HalfMoments:
    """bfloat16, rounded stochastically."""

    def __init__(self, tensors: AdamTensors) -> None:
        self._arrays = tensors.exp_avg, tensors.exp_avg_sq

    def load(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        exp_avg, exp_avg_sq = self._arrays
        return exp_avg[part].float(), exp_avg_sq[part].float()

    def store(
        self, part: slice, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, random: Random
    ) -> None:
        words = random.words(part, exp_avg.device)
        _store_randomly(exp_avg, words & 0xFFFF, self._arrays[0][part])
        _store_randomly(exp_avg_sq, shift_right(words, 16), self._arrays[1][part])


def _store_randomly(values: torch.Tensor, random16: torch.Tensor, to: torch.Tensor) -> None:
    """Between the last finite bf16 and infinity nothing is rounded up."""
    bits = bits_of(values)
    is_last = (shift_right(bits, 16) & 0x7FFF) == _LAST_BF16
    rounded = bits + random16.masked_fill(is_last, 0)
    to.view(torch.int16).copy_(rounded >> 16)


class ByteMoments:
    """Codes of 8 bits with a scale for each block, rounded stochastically."""

    def __init__(self, tensors: AdamTensors) -> None:
        assert tensors.exp_avg_scale is not None
        assert tensors.exp_avg_sq_scale is not None
        self._exp_avg = tensors.exp_avg, tensors.exp_avg_scale
        self._exp_avg_sq = tensors.exp_avg_sq, tensors.exp_avg_sq_scale

    def load(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self._exp_avg
        magnitude = _decode(codes[part] & 0x7F, SIGNED_BIAS, scales[_blocks(part)])
        sign = codes[part].to(torch.int32) >> 7 << 31
        exp_avg = floats_of(bits_of(magnitude) | sign)
        codes, scales = self._exp_avg_sq
        return exp_avg, _decode(codes[part], UNSIGNED_BIAS, scales[_blocks(part)])

    def store(
        self, part: slice, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, random: Random
    ) -> None:
        words = random.words(part, exp_avg.device)
        codes, scales = self._exp_avg
        sign = shift_right(bits_of(exp_avg), 31) << 7
        code = _encode(exp_avg, words & 0xFFFF, scales[_blocks(part)], is_signed=True)
        codes[part].copy_(code & 0x7F | sign)
        codes, scales = self._exp_avg_sq
        random16 = shift_right(words, 16)
        code = _encode(exp_avg_sq, random16, scales[_blocks(part)], is_signed=False)
        codes[part].copy_(code & 0xFF)


def _blocks(part: slice) -> slice:
    """A part begins with a block, and ends with one or with the array."""
    return slice(part.start // MOMENT_BLOCK, -(-part.stop // MOMENT_BLOCK))


def _to_elements(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(MOMENT_BLOCK, output_size=scales.numel() * MOMENT_BLOCK)[:numel]


def _decode(codes: torch.Tensor, bias: int, scales: torch.Tensor) -> torch.Tensor:
    code = codes.to(torch.int32)
    values = floats_of(((code + bias) << CODE_SHIFT).masked_fill(code == 0, 0))
    return values * _to_elements(scales, values.numel())


def _scales_of(values: torch.Tensor, numel_of_blocks: int) -> torch.Tensor:
    """The largest magnitude of each block; NaN if any value is not finite."""
    magnitudes = bits_of(values) & 0x7FFFFFFF
    padded = torch.zeros(numel_of_blocks, dtype=torch.int32, device=values.device)
    padded[: values.numel()] = magnitudes
    largest = padded.view(-1, MOMENT_BLOCK).amax(1)
    return floats_of(largest.masked_fill(largest >= _INFINITY, 0x7FC00000))


def _encode(
    values: torch.Tensor, random16: torch.Tensor, scales: torch.Tensor, *, is_signed: bool
) -> torch.Tensor:
    """The codes of the magnitudes, of which the lower bits count, and their scales."""
    bias = SIGNED_BIAS if is_signed else UNSIGNED_BIAS
    scales.copy_(_scales_of(values, scales.numel() * MOMENT_BLOCK))
    divisor = scales.masked_fill(~(scales > 0.0), 1.0)
    y = one_nan(values.abs() / _to_elements(divisor, values.numel()))
    bits = bits_of(y)
    code = ((bits + (random16 << (CODE_SHIFT - 16))) >> CODE_SHIFT) - bias
    is_below = (bits >> CODE_SHIFT) < bias + 1
    if is_signed:
        least_code = torch.full((), (bias + 1) << CODE_SHIFT, dtype=torch.int32)
        is_least = y > random16.float() * (floats_of(least_code).item() * 2.0**-16)
    else:
        is_least = y > 0.0
    return torch.where(is_below, is_least.to(torch.int32), code)


def moments_of(tensors: AdamTensors, kind: int) -> Moments:
    """How the moments of a job of that ``enum swap_moments`` are kept."""
    if kind == lib.SWAP_MOMENTS_F32:
        return FloatMoments(tensors)
    return HalfMoments(tensors) if kind == lib.SWAP_MOMENTS_BF16 else ByteMoments(tensors)
