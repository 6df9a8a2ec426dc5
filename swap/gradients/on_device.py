"""Gradients that stay on the device where they are made, beside the state that they update.

They are accumulated on the stream that computes them, and their squares are added there in the
order of ``swap.kernels``; the sums come to the host when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from swap.device.homes import DeviceHomes
from swap.device.kernels.squares import block_squares
from swap.plan.layout import PIECE, Segment
from swap.plan.placement import Placement
from swap.tiers import Tier


class DeviceGradients:
    """Those of the subgroups whose gradients are at home on the device: arrays, and for each block
    of ``PIECE`` elements a sum.
    """

    def __init__(self, placement: Placement, homes: DeviceHomes) -> None:
        self._layout = placement.layout
        self._homes = homes
        self._arrays: dict[int, torch.Tensor] = {}
        self._first_block: dict[int, int] = {}
        blocks = 0
        for group in self._layout.subgroups:
            is_here = placement.gradient_home[group.index] is Tier.DEVICE
            if is_here and group.trainable:
                self._arrays[group.index] = homes.allocate(group.numel, group.dtype)
                self._first_block[group.index] = blocks
                blocks += group.numel // PIECE
        self._sums = homes.allocate(blocks, torch.float64)

    def has(self, subgroup: int) -> bool:
        return subgroup in self._arrays

    def of(self, subgroup: int) -> torch.Tensor:
        """The array, which the update reads."""
        return self._arrays[subgroup]

    def add(self, parameter: int, gradient: torch.Tensor, *, accumulate: bool) -> None:
        """Set or accumulate that of ``parameter``, on the stream that computes."""
        flat = gradient.detach().reshape(-1).to(self._homes.device.torch_device)
        for segment in self._layout.segments_of[parameter]:
            self._homes.before_compute([segment.subgroup])
            stop = segment.offset + segment.length
            target = self._arrays[segment.subgroup][segment.offset : stop]
            sums = self._sums[self._blocks(segment)]
            part = flat[segment.start : segment.start + segment.length]
            self._homes.uses(target, writes=True)
            self._homes.uses(sums, writes=True)
            if accumulate:
                target.add_(part)
            else:
                target.copy_(part)
            block_squares(target, sums)

    def sums(self) -> Callable[[int], torch.Tensor]:
        """Brings all sums of squares to host memory, and waits for them. What is returned gives
        those of a parameter, float64, in order.
        """
        found = torch.empty(self._sums.numel(), dtype=torch.float64, device="cpu")
        self._homes.read(self._sums, found)

        def of(parameter: int) -> torch.Tensor:
            segments = self._layout.segments_of[parameter]
            return torch.cat([found[self._blocks(segment)] for segment in segments])

        return of

    def block_squares(self, parameter: int) -> torch.Tensor:
        """Those of one parameter alone."""
        parts = [self._sums[self._blocks(s)] for s in self._layout.segments_of[parameter]]
        found = [torch.empty(part.numel(), dtype=torch.float64, device="cpu") for part in parts]
        for part, out in zip(parts, found, strict=True):
            self._homes.read(part, out)
        return torch.cat(found)

    def _blocks(self, segment: Segment) -> slice:
        """Where its sums are. It begins with a block."""
        first = self._first_block[segment.subgroup] + segment.offset // PIECE
        return slice(first, first + -(-segment.length // PIECE))

    def read(self, parameter: int, out: torch.Tensor) -> None:
        """Copy that of ``parameter`` to flat ``out``, in host memory."""
        for segment in self._layout.segments_of[parameter]:
            stop = segment.offset + segment.length
            part = out[segment.start : segment.start + segment.length]
            self._homes.read(self._arrays[segment.subgroup][segment.offset : stop], part)


def added_up(sums: torch.Tensor) -> float:
    """One after the other, from the first: what ``swap.kernels.sum_of_squares`` gives."""
    return float(np.cumsum(sums.numpy())[-1]) if sums.numel() else 0.0
