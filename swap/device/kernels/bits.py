"""Operations of torch that round as the kernels do, and on the bits of floats.

Each is made of operations that round once, as IEEE says, on CPUs and CUDA devices alike: sums,
products, quotients and roots of float32 and float64. What torch may compute in another way has no
place here: ``addcmul``, ``lerp`` and the like contract, and a quotient by a number of Python is a
product with its inverse on CUDA. Integers are those of two's complement, 32 bits wide.
"""

from __future__ import annotations

import torch

QUIET_NAN = 0x7FC00000
"""The bits of the one NaN that kernels store."""


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """float32 as int32, in the same memory."""
    return values.view(torch.int32)


def floats_of(bits: torch.Tensor) -> torch.Tensor:
    """int32 as float32, in the same memory."""
    return bits.view(torch.float32)


def shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Of 32 bits without a sign: zeros come in."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def signed(word: int) -> int:
    """The number whose 32 bits in two's complement are ``word``."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """``values``, float32, with one NaN for all."""
    return floats_of(bits_of(values).masked_fill(values != values, QUIET_NAN))


def fused(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32, rounded once.

    The product of two floats is exact in double. The sum is rounded to odd: when it is inexact and
    even, it moves to its neighbour on the side of the error. A double so rounded keeps on which
    side of a float's tie the exact sum lies, so rounding it again to float is right.
    """
    product = b.double() * (a.double() if isinstance(a, torch.Tensor) else a)
    wide = c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    del product, wide, part
    bits = total.view(torch.int64)
    is_away = (error > 0.0) == (total > 0.0)
    inexact_and_even = (error != 0.0) & (error == error) & ((bits & 1) == 0)
    bits += torch.where(is_away, 1, -1) * inexact_and_even
    return total.float()


def divided_by(values: torch.Tensor, number: float) -> torch.Tensor:
    """The quotient of float32, by a number that lies on the device."""
    return values / torch.full((), number, dtype=torch.float32, device=values.device)


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Of float32, the nearest one. What torch gives on CPUs, by a library, is at times not that.
    In double the root of a float is at least 4 units in the last place from the middle between two
    floats, so that its last unit does not matter.
    """
    return values.double().sqrt().float()
