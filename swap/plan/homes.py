"""Which units are at home in which tier: choices by bytes, pure.

On a device with memory of its own, a byte of weights that are cached spares two copies of it in a
step, and two reads if it is at home on an SSD. State there spares less for a byte: at most one read
and one write of each, and the copies of what of it are weights and gradients. So room for all
weights comes first, and state after it. Frozen weights take as much at home as in the cache.

Of state, that of what is used first is worth most: its gradients come last in a backward pass, and
the next forward pass begins with it, so that nothing else hides its update. The order of uses is
not known yet; parameters are in the order of their modules, a tied one where it comes first.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, repeat

from swap.plan.layout import Layout, Unit
from swap.plan.rules import UpdateRule
from swap.plan.sizes import (
    DEVICE_SCRATCH_BYTES,
    device_sum_bytes,
    device_weight_bytes,
    gradient_bytes,
    unit_state_bytes,
)
from swap.tiers import Tier

BRIDGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHomes:
    """The units that are at home on the device, and what it takes, in bytes. ``scratch_bytes``: of
    updates there, and sums of squares of gradients; ``cache_bytes``: of weights of all others.
    """

    units: frozenset[int] = frozenset()
    state_bytes: int = 0
    gradient_bytes: int = 0
    scratch_bytes: int = 0
    cache_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """What is at home there instead of elsewhere."""
        return self.state_bytes + self.gradient_bytes


NONE_ON_DEVICE = DeviceHomes()


def homes_beside(
    layout: Layout, *, rule: UpdateRule, device_bytes: int | None, cache_bytes: int
) -> DeviceHomes:
    """As ``on_device``; without ``device_bytes`` a cache alone."""
    if device_bytes is None:
        return DeviceHomes(cache_bytes=cache_bytes)
    return on_device(layout, rule, device_bytes)


def on_device(layout: Layout, rule: UpdateRule, device_bytes: int) -> DeviceHomes:
    """What is at home in ``device_bytes``, beside a cache for the weights of all others: frozen
    ones, then state of what is used first.
    """
    largest = max((spec.padded_numel * spec.dtype.itemsize for spec in layout.specs), default=0)
    weights = sum(device_weight_bytes(spec) for spec in layout.specs)
    units: list[int] = []
    state = gradients = scratch = 0
    for unit in _in_order(layout, rule):
        more_state, more_gradients = unit_state_bytes(unit, rule), gradient_bytes(unit)
        left = weights - sum(device_weight_bytes(layout.specs[i]) for i in unit.parameters)
        more_scratch = device_sum_bytes(unit)
        if unit.trainable and not gradients:
            more_scratch += DEVICE_SCRATCH_BYTES
        at_home = state + gradients + scratch + more_state + more_gradients + more_scratch
        if at_home + left + 2 * largest <= device_bytes:
            units.append(unit.index)
            weights, state, gradients = left, state + more_state, gradients + more_gradients
            scratch += more_scratch
    return DeviceHomes(
        units=frozenset(units),
        state_bytes=state,
        gradient_bytes=gradients,
        scratch_bytes=scratch,
        cache_bytes=min(weights + 2 * largest, device_bytes - state - gradients - scratch),
    )


def _in_order(layout: Layout, rule: UpdateRule) -> list[Unit]:
    """What can be at home on a device, what is worth most first."""
    moving = [unit for unit in layout.units if not unit.always_on_host]
    trained = [unit for unit in moving if unit.trainable and rule.updates_on_device]
    return [*(unit for unit in moving if not unit.trainable), *trained]


def homes_of(
    units: Sequence[Unit], in_host: Set[int], on_device: Set[int] = frozenset()
) -> tuple[Tier, ...]:
    """The home of each subgroup."""

    def tier(unit: Unit) -> Tier:
        if unit.index in on_device:
            return Tier.DEVICE
        return Tier.HOST if unit.index in in_host else Tier.NVME

    return tuple(chain.from_iterable(repeat(tier(unit), unit.num_subgroups) for unit in units))
