"""Where optimizer state lies whose weights and gradients are the program's: pure, no I/O.

Subgroups, staging slots and homes are as for whole models (see ``placement``), and so is what a
checkpoint is staged in. There is no arena and no spill; and as nothing but an update touches such
state, a split parameter may lie in host memory in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swap.plan.layout import PASSAGE_BYTES, PIECE, Layout, ParameterSpec, pack
from swap.plan.placement import Placement, all_in_host
from swap.plan.rules import UpdateRule
from swap.plan.sizes import (
    MAX_SLOTS,
    MAX_SUBGROUP_ELEMENTS,
    MIN_CHECKPOINT_BYTES,
    MIN_SLOTS,
    capacity_for_whole,
    checkpoint_bytes,
    choose_first,
    element_bytes,
    least_staging_bytes,
    slot_bytes_of,
    state_bytes,
    subgroup_elements,
    total_bytes,
)
from swap.tiers import Budget, BudgetError, Tier, format_bytes

_STAGING_SHARE = 1 / 3
"""Of what is free, for staging slots. What a step leaves in them is not read by the next one, so
they spare nearly as much traffic as state at home does; and a step costs the processors less, the
fewer subgroups there are.
"""
_SMALL_ELEMENTS = 256 * 1024
_SHARE_OF_SMALL = 0.5
"""The same for subgroups of fewer elements, each of which costs more than its kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What of a budget was given out before, to other parameters or to the caller; in bytes.

    ``slot_bytes``: the size of the staging slots that are there, and serve all parameters. They
    and the passage are among ``host_bytes`` then.
    """

    host_bytes: int = 0
    slot_bytes: int = 0


def place_state(
    specs: Sequence[ParameterSpec], rule: UpdateRule, budget: Budget, taken: Taken
) -> Placement:
    """Decide every home, in what is left of ``budget``. ``num_slots`` is 0 where the slots that
    are there are used.

    Raises ``BudgetError`` with the least budget that works when ``budget`` is below it.
    """
    assert all(spec.state_only for spec in specs)
    everything = pack(specs, capacity_for_whole(specs))
    total = total_bytes(everything, rule)
    at_work = min(total, _least_bytes(specs, rule, taken))
    least = taken.host_bytes + at_work + MIN_CHECKPOINT_BYTES
    whole = taken.host_bytes + total + MIN_CHECKPOINT_BYTES
    if whole <= budget.host_bytes:
        placement, needed = all_in_host(everything, rule), total
    elif least <= budget.host_bytes:
        placement, needed = _placed_within(specs, rule, budget, taken, at_work), at_work
    else:
        raise BudgetError(
            f"host_memory={format_bytes(budget.host_bytes)} is too small: at least "
            f"{format_bytes(least)} ({least} bytes) are needed for the optimizer state to pass "
            f"through and to be saved, of which {format_bytes(taken.host_bytes)} are given out "
            "(also to parameters that have left the groups: their state is kept); "
            f"{format_bytes(whole)} ({whole} bytes) would hold all of it",
            least_host_bytes=least,
        )
    aside = checkpoint_bytes(budget.host_bytes, taken.host_bytes + needed)
    return replace(placement, least_host_bytes=least, checkpoint_bytes=aside)


def _placed_within(
    specs: Sequence[ParameterSpec], rule: UpdateRule, budget: Budget, taken: Taken, at_work: int
) -> Placement:
    aside = checkpoint_bytes(budget.host_bytes, taken.host_bytes + at_work)
    free = budget.host_bytes - taken.host_bytes - aside - _passage_bytes(taken)
    elements = _elements_in_slots(specs, rule, taken) or _subgroup_elements(specs, rule, free)
    return _fill(pack(specs, elements), rule, free, taken)


def _least_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule, taken: Taken) -> int:
    """What state that is on NVMe passes through."""
    if _elements_in_slots(specs, rule, taken):
        return 0
    return least_staging_bytes(specs, rule) + _passage_bytes(taken)


def _passage_bytes(taken: Taken) -> int:
    return 0 if taken.slot_bytes else PASSAGE_BYTES


def _elements_in_slots(specs: Sequence[ParameterSpec], rule: UpdateRule, taken: Taken) -> int:
    """Of the largest subgroup that the slots which are there hold; 0 if they hold none."""
    elements = int(taken.slot_bytes / max(1, element_bytes(specs, rule))) // PIECE * PIECE
    return min(elements, MAX_SUBGROUP_ELEMENTS)


def _subgroup_elements(specs: Sequence[ParameterSpec], rule: UpdateRule, free: int) -> int:
    small = min(subgroup_elements(specs, rule, free, _SHARE_OF_SMALL), _SMALL_ELEMENTS)
    return max(subgroup_elements(specs, rule, free, _STAGING_SHARE), small)


def _num_slots(free: int, slot_bytes: int) -> int:
    """As many as are of use, where the budget has room for them."""
    return MAX_SLOTS if MAX_SLOTS * slot_bytes <= free else MIN_SLOTS


def _fill(layout: Layout, rule: UpdateRule, free: int, taken: Taken) -> Placement:
    slot_bytes = max(slot_bytes_of(unit, rule) for unit in layout.units)
    num_slots = 0 if slot_bytes <= taken.slot_bytes else _num_slots(free, slot_bytes)
    costs = {group.index: state_bytes(group, rule) for group in layout.subgroups}
    in_host, _ = choose_first(costs, free - num_slots * slot_bytes)
    state_host_bytes = sum(costs[index] for index in in_host)
    return Placement(
        layout=layout,
        state_home=tuple(Tier.HOST if index in in_host else Tier.NVME for index in costs),
        gradient_home=(Tier.HOST,) * len(costs),
        arena_bytes=0,
        num_slots=num_slots,
        slot_bytes=slot_bytes if num_slots else 0,
        scratch_bytes=0,
        spill_chunk_bytes=0,
        state_host_bytes=state_host_bytes,
        gradient_host_bytes=0,
        state_nvme_bytes=sum(costs.values()) - state_host_bytes,
        gradient_nvme_bytes=0,
    )
