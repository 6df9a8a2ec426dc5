"""What subgroups and units take, in bytes: pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from swap.plan.layout import Component, Layout, Subgroup, Unit
from swap.plan.rules import UpdateRule


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
