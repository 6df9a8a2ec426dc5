"""What subgroups and units take, in bytes, what a device does, and which of them fit: pure, no
I/O.

In host memory, a device with memory of its own takes room for weights on their way there and for
gradients on their way back. That is a matter of what is under way at once, not of the model: what
it does not need holds state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swap.plan.layout import (
    DEVICE_ALIGNMENT,
    Component,
    Layout,
    ParameterSpec,
    Subgroup,
    Unit,
)
from swap.plan.rules import UpdateRule

MAX_LANDING_BYTES = 256 * 1024 * 1024
"""Unless two of the largest weights take more: reads of some tens of milliseconds, while which the
copies before them may wait for the device.
"""
MAX_INBOX_BYTES = 64 * 1024 * 1024
"""A gradient goes in pieces; so many bytes are copied in less time than it takes to store them."""


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
    aligned = sum(-(-spec.weight_bytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT for spec in specs)
    most = aligned + 2 * largest
    return DeviceSizes(
        least_landing_bytes=min(2 * largest, moving),
        most_landing_bytes=min(max(2 * largest, MAX_LANDING_BYTES), moving),
        inbox_bytes=min(2 * largest, MAX_INBOX_BYTES),
        device_bytes=most if device_bytes is None else min(device_bytes, most),
    )


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
