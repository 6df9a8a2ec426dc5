"""What subgroups and units take, in bytes, what a device does, and which of them fit: pure, no
I/O.

In host memory, a device with memory of its own takes room for weights on their way there and for
gradients on their way back. That is a matter of what is under way at once, not of the model: what
it does not need holds state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swap.plan.layout import (
    DEVICE_ALIGNMENT,
    PAGE,
    PIECE,
    Component,
    Layout,
    ParameterSpec,
    Subgroup,
    Unit,
    pack,
)
from swap.plan.rules import UpdateRule

MIN_SUBGROUP_ELEMENTS = 64 * 1024
MAX_SUBGROUP_ELEMENTS = 2 * 1024 * 1024
"""Components of 4 and 8 MiB: long requests already. Larger ones take staging memory that would hold
state, and are written later: with four times as many elements a step with half of its state in
memory took 1.08 times its I/O in place of 1.02, and 440 MiB more for that half.
"""
MOST_SUBGROUPS = 8192
"""As far as the largest subgroups allow: each has objects of its own, some 2 KiB."""
MIN_SLOTS = 3
"""One subgroup being read, one in the kernel, one being written."""
MAX_SLOTS = 4
STAGING_SHARE = 0.25
UNITS_OF_INFERENCE = 64
"""Or more. What is at home is a whole number of units, and what is left over spares no reads."""
CHECKSUM_BYTES = 4
"""Of each page of a swap file whose bytes are verified."""
MAX_LANDING_BYTES = 256 * 1024 * 1024
"""Unless two of the largest weights take more: reads of some tens of milliseconds, while which the
copies before them may wait for the device.
"""
MAX_INBOX_BYTES = 64 * 1024 * 1024
"""A gradient goes in pieces; so many bytes are copied in less time than it takes to store them."""

MIN_CHECKPOINT_BYTES = 4 * 1024 * 1024
MAX_CHECKPOINT_BYTES = 256 * 1024 * 1024
_SUM_BYTES = 8
DEVICE_SCRATCH_BYTES = 25 * 1024 * 1024
"""Of updates on a device, where they are not one kernel."""


def components_of(subgroup: Subgroup | Unit, rule: UpdateRule) -> tuple[Component, ...]:
    """The components of ``subgroup``, the weights first where they are kept."""
    weights = () if subgroup.state_only else (Component("weight", subgroup.dtype),)
    return (*weights, *rule.components(subgroup.dtype)) if subgroup.trainable else weights


def nbytes_of(components: Sequence[Component], elements: int) -> int:
    """Bytes of ``components`` of so many elements."""
    return sum(component.nbytes(elements) for component in components)


def state_bytes(subgroup: Subgroup, rule: UpdateRule) -> int:
    """Bytes of all components of ``subgroup``: weights and what an update needs, but gradients."""
    return nbytes_of(components_of(subgroup, rule), subgroup.numel)


def gradient_bytes(subgroup: Subgroup | Unit) -> int:
    """Bytes of the gradient that is kept for ``subgroup``."""
    is_kept = subgroup.trainable and not subgroup.state_only
    return subgroup.numel * subgroup.dtype.itemsize if is_kept else 0


def unit_state_bytes(unit: Unit, rule: UpdateRule) -> int:
    """What ``state_bytes`` of its subgroups come to."""
    kept = components_of(unit, rule)
    return sum(count * nbytes_of(kept, elements) for elements, count in unit.sizes)


def slot_bytes_of(unit: Unit, rule: UpdateRule) -> int:
    """State and gradient of its largest subgroup."""
    state = nbytes_of(components_of(unit, rule), unit.largest)
    return state if unit.state_only else state + unit.largest * unit.dtype.itemsize


def scratch_bytes_of(layout: Layout, rule: UpdateRule) -> int:
    """What the rule takes for the largest subgroup."""
    largest = max((unit.largest for unit in layout.units if unit.trainable), default=0)
    return largest * rule.scratch_bytes_per_element


def total_bytes(layout: Layout, rule: UpdateRule) -> int:
    """What all of it takes in memory, gradients and scratch included."""
    held = sum(unit_state_bytes(unit, rule) + gradient_bytes(unit) for unit in layout.units)
    return held + scratch_bytes_of(layout, rule)


def fixed_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule) -> int:
    """Bytes of the small parameters, which stay in host memory with all their state; at most, for
    in larger subgroups fewer pages are taken for the last values of a component.
    """
    small = (spec for spec in specs if spec.always_on_host)
    renumbered = [replace(spec, index=index) for index, spec in enumerate(small)]
    layout = pack(renumbered, least_elements(specs, rule))
    return sum(unit_state_bytes(unit, rule) + gradient_bytes(unit) for unit in layout.units)


def element_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule) -> float:
    """Most staging bytes for an element of the widest kind: its components and its gradient.

    Components with a value for many elements take whole pages, so large subgroups need less for
    each.
    """
    elements = least_elements(specs, rule)
    kinds = {(s.dtype, s.state_only) for s in specs if s.trainable and not s.always_on_host}
    per_element = (
        nbytes_of(rule.components(dtype), elements) / elements
        + (0 if state_only else 2 * dtype.itemsize)
        for dtype, state_only in kinds
    )
    return max(per_element, default=0)


def least_elements(specs: Sequence[ParameterSpec], rule: UpdateRule) -> int:
    """Of a subgroup: so many that what is kept for each of them is little for all of them."""
    even = sum(spec.padded_numel for spec in specs) // MOST_SUBGROUPS // PIECE * PIECE
    least = max(MIN_SUBGROUP_ELEMENTS, min(even, MAX_SUBGROUP_ELEMENTS))
    if not rule.whole_parameters:
        return least
    trained = (spec.padded_numel for spec in specs if spec.trainable)
    return max(least, max(trained, default=0))


def least_staging_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule) -> int:
    """The fewest slots of the smallest subgroups, and what the rule takes for one of them."""
    nbytes = MIN_SLOTS * element_bytes(specs, rule) + rule.scratch_bytes_per_element
    return math.ceil(least_elements(specs, rule) * nbytes)


def subgroup_elements(
    specs: Sequence[ParameterSpec],
    rule: UpdateRule,
    host_bytes: int,
    share: float = STAGING_SHARE,
) -> int:
    """The largest subgroup whose slots take no more than their share of what is free; where nothing
    is staged, as no steps are taken, one that leaves little memory without a use.
    """
    least = least_elements(specs, rule)
    if not rule.takes_steps:
        even = sum(spec.padded_numel for spec in specs) // UNITS_OF_INFERENCE // PIECE * PIECE
        return max(least, min(even, MAX_SUBGROUP_ELEMENTS))
    free = host_bytes - fixed_bytes(specs, rule)
    nbytes = MAX_SLOTS * element_bytes(specs, rule) + rule.scratch_bytes_per_element
    elements = int(free * share / max(1, nbytes)) // PIECE * PIECE
    return max(least, min(elements, MAX_SUBGROUP_ELEMENTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSizes:
    """In bytes. With ``least_landing_bytes`` it works, ``most_landing_bytes`` are of use."""

    least_landing_bytes: int
    most_landing_bytes: int
    inbox_bytes: int
    device_bytes: int


def device_sizes(specs: Sequence[ParameterSpec], device_bytes: int | None) -> DeviceSizes:
    """What is taken for weights of ``specs``, on the device at most ``device_bytes``: all of them,
    and two more, as old weights are there until those that replace them have come.
    """
    padded = [spec.padded_numel * spec.dtype.itemsize for spec in specs]
    largest = max(padded, default=0)
    moving = sum(
        nbytes for spec, nbytes in zip(specs, padded, strict=True) if not spec.always_on_host
    )
    most = sum(map(device_weight_bytes, specs)) + 2 * largest
    return DeviceSizes(
        least_landing_bytes=min(2 * largest, moving),
        most_landing_bytes=min(max(2 * largest, MAX_LANDING_BYTES), moving),
        inbox_bytes=min(2 * largest, MAX_INBOX_BYTES),
        device_bytes=most if device_bytes is None else min(device_bytes, most),
    )


def capacity_for_whole(specs: Sequence[ParameterSpec]) -> int:
    largest = max((spec.padded_numel for spec in specs), default=PIECE)
    return max(largest, MAX_SUBGROUP_ELEMENTS)


def checksum_bytes(nbytes: int) -> int:
    """What the checksums of so many bytes of swap files take."""
    return -(-nbytes // PAGE) * CHECKSUM_BYTES


def checkpoint_bytes(host_bytes: int, needed: int) -> int:
    """What a save or a load may stage in: a sixteenth of the budget, if ``needed`` leaves that."""
    aside = min(host_bytes // 16, MAX_CHECKPOINT_BYTES, host_bytes - needed)
    return max(MIN_CHECKPOINT_BYTES, aside // PIECE * PIECE)


def device_sum_bytes(unit: Unit) -> int:
    """Of sums of squares of its gradient, one for each block, which are beside it on a device."""
    if not gradient_bytes(unit):
        return 0
    return sum(count * pages_of_sums(elements) for elements, count in unit.sizes)


def pages_of_sums(elements: int) -> int:
    """Bytes of the sums of so many elements, in whole pages."""
    return -(-elements // PIECE * _SUM_BYTES // PAGE) * PAGE


def device_weight_bytes(spec: ParameterSpec) -> int:
    """What its weights take in a slab of device memory."""
    return -(-spec.weight_bytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT


def choose_first(costs: Mapping[int, int], left: int) -> tuple[set[int], int]:
    """Of units or subgroups, with their bytes, those that fit into ``left``, the first ones first;
    and what is left then.
    """
    chosen: set[int] = set()
    for unit, nbytes in costs.items():
        if nbytes <= left:
            chosen.add(unit)
            left -= nbytes
    return chosen, left


def choose_evenly(costs: Mapping[int, int], left: int) -> tuple[set[int], int]:
    """Of units with their bytes those that fit into ``left``, spread evenly; and what is left
    then.
    """
    total = sum(costs.values())
    fraction = min(1.0, left / total) if total else 0.0
    chosen: set[int] = set()
    due = 0.0
    for unit, nbytes in costs.items():
        due += nbytes * fraction
        if nbytes <= left and due >= nbytes - 1e-6:
            chosen.add(unit)
            left -= nbytes
            due -= nbytes
    for unit, nbytes in costs.items():
        if unit not in chosen and nbytes <= left:
            chosen.add(unit)
            left -= nbytes
    return chosen, left


def choose_homes(
    gradients: Mapping[int, int], states: Mapping[int, int], left: int, *, takes_steps: bool
) -> tuple[set[int], set[int], int]:
    """Units whose gradients, and whose state, are in ``left`` bytes of host memory; and what is
    left then.
    """
    if takes_steps:
        gradient_home, left = choose_evenly(gradients, left)
        state_home, left = choose_first(states, left)
    else:
        state_home, left = choose_evenly(states, left)
        gradient_home, left = choose_evenly(gradients, left)
    return gradient_home, state_home, left
