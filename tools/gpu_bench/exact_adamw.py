"""AdamW in operations of torch, on any device, with the bits of the library's own kernel.

Written apart from the library, to be compared with it: training in device memory alone takes these
steps, and offloaded training has to end with the same bits. It is slow, some forty passes over
memory, and knows finite values alone.

The kernel rounds after each operation but for two, a product that a sum follows, which round once.
Operations of torch round once each, with two exceptions that are avoided here: a scalar divisor
on a GPU is multiplied by its reciprocal, and square roots on a CPU are not always the nearest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_CHUNK_ELEMENTS = 16 << 20
"""Elements that are updated at once: what stands between two operations is in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``torch.optim.AdamW``, with its defaults."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class Moments:
    """The running averages of one parameter; ``step`` counts from 1."""

    def __init__(self, master: torch.Tensor, options: Options) -> None:
        if options.beta1 <= 0.5:
            raise ValueError(f"beta1={options.beta1} must be more than 0.5")
        self._options = options
        self._first = torch.zeros_like(master)
        self._second = torch.zeros_like(master)
        self._step = 0

    @torch.no_grad()
    def update(self, master: torch.Tensor, gradient: torch.Tensor, grad_scale: float) -> None:
        """Step ``master``, float32 and contiguous, by ``gradient * grad_scale``."""
        self._step += 1
        flat = (master, self._first, self._second, gradient.contiguous())
        chunks = (tensor.view(-1).split(_CHUNK_ELEMENTS) for tensor in flat)
        for values, first, second, slope in zip(*chunks, strict=True):
            self._update(values, first, second, slope.float() * _single(grad_scale))

    def _update(self, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
        by = self._options
        bias1, bias2 = 1.0 - by.beta1**self._step, 1.0 - by.beta2**self._step
        p.mul_(_single(1.0 - by.lr * by.weight_decay))
        m.copy_(_fused(_single(1.0 - by.beta1), g - m, m))
        v.copy_(_fused(g * _single(1.0 - by.beta2), g, v * _single(by.beta2)))
        root = v.double().sqrt().float()
        # A tensor on the device, or the quotient is a product there.
        divisor = torch.full((1,), _single(math.sqrt(bias2)), device=p.device)
        p.add_(m * _single(-by.lr / bias1) / (root / divisor + _single(by.eps)))


def _single(value: float) -> float:
    """``value`` rounded to float32."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _fused(a: float | torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 values, rounded once.

    The product is exact in double. The sum there is made odd where it is not exact (the last bit
    says that something follows), and what is odd rounds to float32 as the exact sum does.
    """
    product = b.double() * (a if isinstance(a, float) else a.double())
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & ((bits & 1) == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(to_odd, bits + towards, bits).view(torch.float64).float()
