"""A transformer that is not there: its parameters and the arithmetic of its step.

Linear layers of 12 x hidden^2 parameters in a layer, as ZeRO-Infinity counts them (section 3),
without vocabulary, norms and biases. ``micro_batch`` sequences of ``tokens`` are computed at once
on a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from simulator.trace import Op, Phase, Trace
from swap.plan.layout import ParameterSpec

_PARTS = (("qkv", 3), ("proj", 1), ("up", 4), ("down", 4))
"""The matrices of a layer, in multiples of hidden^2."""
_TYPICAL_ASPECT = 128
"""Hidden size for each layer, as GPT-3 has it, where only a number of parameters is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """``recomputes``: activations are kept at the borders of layers, and all between is computed
    once more in the backward pass. Matrices of more than ``max_parameter_bytes`` are cut into tiles
    of one size.
    """

    layers: int
    hidden: int
    tokens: int
    micro_batch: float
    recomputes: bool = True
    max_parameter_bytes: int | None = None

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
    def checkpoint_bytes(self) -> int:
        """Activations at the borders of layers, of a rank (section 3, with one a layer)."""
        return int(2 * self.micro_batch * self.tokens * self.hidden) * self.layers

    def trace(self, dtype: torch.dtype = torch.bfloat16) -> Trace:
        tiles = self._tiles(dtype)
        specs = tuple(
            ParameterSpec(
                index=layer * len(tiles) + place,
                name=f"layer {layer} {name}",
                numel=numel,
                dtype=dtype,
                trainable=True,
            )
            for layer in range(self.layers)
            for place, (name, numel) in enumerate(tiles)
        )
        whole = sum(numel for _, numel in tiles) + max(numel for _, numel in tiles)
        sizes = [numel for _, numel in tiles]
        return Trace(
            specs=specs,
            rows=(self.hidden,) * len(specs),
            block_bytes=whole * dtype.itemsize,
            ops=(*self._forward(range(self.layers), "forward", sizes), *self._backward(sizes)),
        )

    def _tiles(self, dtype: torch.dtype) -> list[tuple[str, int]]:
        """Names and elements of the matrices of a layer, or of their tiles."""
        found = []
        for name, times in _PARTS:
            numel = times * self.hidden**2
            count = 1
            if self.max_parameter_bytes is not None:
                count = -(-numel * dtype.itemsize // self.max_parameter_bytes)
            found += [(f"{name} {tile}", -(-numel // count)) for tile in range(count)]
        return found

    def _forward(self, layers: range, phase: Phase, sizes: list[int]) -> Iterator[Op]:
        """``phase`` is backward where a layer is computed again."""
        kept = self.checkpoint_bytes // self.layers if self.recomputes else 0
        for layer in layers:
            for place, numel in enumerate(sizes):
                yield Op(
                    phase=phase,
                    uses=(layer * len(sizes) + place,),
                    flops=self._flops(numel),
                    activation_bytes=0 if place else kept,
                )

    def _backward(self, sizes: list[int]) -> Iterator[Op]:
        for layer in reversed(range(self.layers)):
            if self.recomputes:
                yield from self._forward(range(layer, layer + 1), "backward", sizes)
            for place in reversed(range(len(sizes))):
                index = layer * len(sizes) + place
                flops = 2 * self._flops(sizes[place])
                yield Op(phase="backward", uses=(index,), gradients=(index,), flops=flops)

    def _flops(self, numel: int) -> float:
        return 2.0 * numel * self.micro_batch * self.tokens


def shape_of(num_parameters: float) -> tuple[int, int]:
    """(layers, hidden) of a transformer of about that size, 128 wide for each of its layers."""
    layers = max(1, round((num_parameters / (12 * _TYPICAL_ASPECT**2)) ** (1 / 3)))
    hidden = round((num_parameters / (12 * layers)) ** 0.5 / _TYPICAL_ASPECT) * _TYPICAL_ASPECT
    return layers, max(_TYPICAL_ASPECT, hidden)
