"""What a step moves between host memory and NVMe, by formula: pure, no I/O.

An update reads and writes each component of every subgroup on NVMe once, but zeros are never read.
A gradient that is spilled is written once for each backward pass, and read once for each: by the
next backward pass, which adds to it, and in the end by the update.

Weights are passed over 2 N + 1 times in a step with N forward and N backward passes: N times
forwards, N times backwards, and once by the update. What was used last in one pass is used first
in the next, and the arena keeps it: a pass over W bytes with an arena of A reads W - A, where A
counts whole parameters. The figure is exact where one transfer follows the other and parameters
are of one size. Where they overlap, the update finds weights in the arena that the backward pass
has just used, or passes its new ones on to the forward pass: that saves up to W - A. On the other
hand, what was updated during the backward pass may have left its slot when the step is taken, and
is read again: that costs up to A (or W, if that is less).

On a device with memory of its own A is that memory, and what is at home in host memory takes its
part of it. That is of the first weights, so a pass forwards may find less of what is on NVMe than
one backwards.

Passes of inference follow one another forwards. What is read ahead in the arena is needed sooner
than what has been used, which is gone when its turn comes again: each pass reads W.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass

from swap.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one step in steady state. ``state``: what the update keeps beside the weights.

    ``weights_kept`` is what the arena holds, of those on NVMe, as a step ends.
    """

    state_read: int = 0
    state_written: int = 0
    gradients_read: int = 0
    gradients_written: int = 0
    weights_read: int = 0
    weights_written: int = 0
    weights_kept: int = 0

    @property
    def read(self) -> int:
        return self.state_read + self.gradients_read + self.weights_read

    @property
    def written(self) -> int:
        return self.state_written + self.gradients_written + self.weights_written


def traffic_of(placement: Placement, *, backward_passes: int = 1) -> Traffic:
    """The traffic of a step in which every trained parameter gets ``backward_passes`` gradients,
    and every parameter is used once in each forward pass; of a pass of inference, if there are
    none.
    """
    moving = placement.units_on_nvme
    trained = sum(unit.numel * unit.dtype.itemsize for unit in moving if unit.trainable)
    frozen = sum(unit.numel * unit.dtype.itemsize for unit in moving if not unit.trainable)
    if not backward_passes:
        return Traffic(weights_read=0 if _fits(placement) else trained + frozen)
    kept, kept_backwards = _kept_of(placement)
    state = placement.state_nvme_bytes - trained - frozen
    gradients = placement.gradient_nvme_bytes * backward_passes
    passes = backward_passes * (2 * (trained + frozen) - kept - kept_backwards)
    return Traffic(
        state_read=state,
        state_written=state,
        gradients_read=gradients,
        gradients_written=gradients,
        weights_read=passes + max(0, trained - kept),
        weights_written=trained,
        weights_kept=kept,
    )


def _kept_of(placement: Placement) -> tuple[int, int]:
    """Bytes on NVMe of the first weights that fit whole, and of the last ones."""
    on_nvme = {index for unit in placement.units_on_nvme for index in unit.parameters}
    if not placement.device_bytes:
        kept = _kept(placement, sorted(on_nvme), on_nvme, placement.arena_bytes)
        return kept, kept
    at_home = {index for unit in placement.units_on_device for index in unit.parameters}
    order = [index for index in range(len(placement.layout.specs)) if index not in at_home]
    room = placement.device_bytes
    return (
        _kept(placement, order, on_nvme, room),
        _kept(placement, reversed(order), on_nvme, room),
    )


def _fits(placement: Placement) -> bool:
    """Whether all weights that are on NVMe, also in part, are kept from one pass to the next."""
    on_nvme = {index for unit in placement.units_on_nvme for index in unit.parameters}
    every = _kept(placement, sorted(on_nvme), on_nvme, sys.maxsize)
    return _kept_of(placement)[0] == every


def _kept(placement: Placement, order: Iterable[int], counted: Set[int], room: int) -> int:
    """Of the weights that fit whole into ``room``, in that order, the bytes of those counted."""
    kept = 0
    for index in order:
        spec = placement.layout.specs[index]
        nbytes = spec.padded_numel * spec.dtype.itemsize
        if nbytes > room:
            break
        room -= nbytes
        kept += nbytes if index in counted else 0
    return kept
