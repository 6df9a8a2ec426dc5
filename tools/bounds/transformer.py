"""A transformer on the meta device: its parameters and the arithmetic of its step.

Linear layers of 12 x hidden^2 parameters in a layer, as ZeRO-Infinity counts them (section 3),
without vocabulary, norms and biases. ``micro_batch`` sequences of ``tokens`` are computed at once
on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_TYPICAL_ASPECT = 128
"""Hidden size for each layer, as GPT-3 has it, where only a number of parameters is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """``recomputes``: activations are kept at the borders of layers, and all between is computed
    once more in the backward pass. Without, all are kept and none are counted.
    """

    layers: int
    hidden: int
    tokens: int
    micro_batch: float
    recomputes: bool = True

    @property
    def num_parameters(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def flops(self) -> float:
        """Of a rank's step, attention's scores left out: 2 for each parameter and token forwards,
        twice that backwards, once more for recomputing (ZeRO-Infinity, section 4.1).
        """
        passes = 4 if self.recomputes else 3
        return 2.0 * passes * self.micro_batch * self.tokens * self.num_parameters

    @property
    def activation_bytes(self) -> int:
        """Those at the borders of layers, of a rank (section 3, with one a layer)."""
        border = int(2 * self.micro_batch * self.tokens * self.hidden)
        return border * self.layers if self.recomputes else 0

    def module(self) -> nn.Module:
        """Its parameters, without memory and without a forward pass."""
        return nn.ModuleList(_Layer(self.hidden) for _ in range(self.layers))


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.proj = _linear(hidden, 3 * hidden), _linear(hidden, hidden)
        self.up, self.down = _linear(hidden, 4 * hidden), _linear(4 * hidden, hidden)


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, device="meta")


def shape_of(num_parameters: float) -> tuple[int, int]:
    """(layers, hidden) of a transformer of about that size, 128 wide for each of its layers."""
    layers = max(1, round((num_parameters / (12 * _TYPICAL_ASPECT**2)) ** (1 / 3)))
    hidden = round((num_parameters / (12 * layers)) ** 0.5 / _TYPICAL_ASPECT) * _TYPICAL_ASPECT
    return layers, max(_TYPICAL_ASPECT, hidden)
