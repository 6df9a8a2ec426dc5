"""Where the state of an ``OffloadedAdamW`` lives under a budget: pure, no I/O.

The parameters themselves are elsewhere and cost nothing here. Host memory is given out in this
order: what a checkpoint is staged in, copies of weights and gradients that live on another device,
the slots that state passes through, then state at home. A slot keeps what it held last until the
next step, so a byte of slots spares as much traffic as a byte of home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swap.plan.layout import PIECE, Layout, ParameterSpec, Subgroup, pack
from swap.plan.rules import UpdateRule
from swap.tiers import BudgetError, Tier, format_bytes

MIN_SUBGROUP_ELEMENTS = 64 * 1024
MAX_SUBGROUP_ELEMENTS = 8 * 1024 * 1024
MIN_SLOTS = 3
"""One subgroup being read, one in the kernel, one being written."""
MAX_SLOTS = 4
SLOT_SHARE = 0.25
MIN_CHECKPOINT_BYTES = 4 * 1024 * 1024
MAX_CHECKPOINT_BYTES = 256 * 1024 * 1024
TRANSFER_ELEMENTS = 256 * 1024
"""Elements of weights and gradients that are brought to the host at once from another device."""
TRANSFER_BYTES = TRANSFER_ELEMENTS * (4 + 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The budget, what of it is taken, and the size of the slots that there are already; bytes."""

    budget_bytes: int
    taken_bytes: int
    slot_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.taken_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlacement:
    """Homes of the state of some parameters; ``homes`` is indexed by subgroup, sizes are in bytes.

    ``num_slots`` is 0 where no slots are needed, or where those that exist are used.
    """

    layout: Layout
    homes: tuple[Tier, ...]
    num_slots: int
    slot_bytes: int
    host_bytes: int
    nvme_bytes: int


def checkpoint_bytes(host_bytes: int) -> int:
    """What a save or a load may stage in: a sixteenth of the budget, within bounds."""
    return max(MIN_CHECKPOINT_BYTES, min(host_bytes // 16, MAX_CHECKPOINT_BYTES))


def state_bytes(subgroup: Subgroup, rule: UpdateRule) -> int:
    """Bytes of all that is kept for the parameters of ``subgroup`` beside the weights."""
    return subgroup.numel * _element_bytes(subgroup, rule)


def place_state(
    specs: Sequence[ParameterSpec], rule: UpdateRule, memory: HostMemory
) -> StatePlacement:
    """Decide every home.

    Raises ``BudgetError`` with the least budget that works when it is below that.
    """
    largest = max(spec.padded_numel for spec in specs)
    whole = pack(specs, max(largest, MAX_SUBGROUP_ELEMENTS))
    total = sum(state_bytes(group, rule) for group in whole.subgroups)
    if total <= memory.free_bytes:
        return _placement(whole, rule, {group.index for group in whole.subgroups}, (0, 0))
    layout = pack(specs, _subgroup_elements(whole, rule, memory))
    num_slots, slot_bytes = _slots(layout, rule, memory)
    free = memory.free_bytes - num_slots * slot_bytes
    if free < 0:
        raise _too_small(total, min(total, num_slots * slot_bytes), memory)
    at_home: set[int] = set()
    for group in layout.subgroups:
        if state_bytes(group, rule) <= free:
            at_home.add(group.index)
            free -= state_bytes(group, rule)
    return _placement(layout, rule, at_home, (num_slots, slot_bytes))


def _element_bytes(subgroup: Subgroup, rule: UpdateRule) -> int:
    return sum(component.dtype.itemsize for component in rule.components(subgroup.dtype))


def _subgroup_elements(whole: Layout, rule: UpdateRule, memory: HostMemory) -> int:
    """The largest subgroup whose slots keep to their share, or that existing slots hold."""
    widest = max(_element_bytes(group, rule) for group in whole.subgroups)
    if memory.slot_bytes:
        return max(PIECE, memory.slot_bytes // widest // PIECE * PIECE)
    share = int(memory.free_bytes * SLOT_SHARE) // (MAX_SLOTS * widest) // PIECE * PIECE
    return max(MIN_SUBGROUP_ELEMENTS, min(share, MAX_SUBGROUP_ELEMENTS))


def _slots(layout: Layout, rule: UpdateRule, memory: HostMemory) -> tuple[int, int]:
    """Number and size of the slots to be made."""
    slot_bytes = max(state_bytes(group, rule) for group in layout.subgroups)
    if slot_bytes <= memory.slot_bytes:
        return 0, 0
    fits = MAX_SLOTS * slot_bytes <= memory.free_bytes
    return (MAX_SLOTS if fits else MIN_SLOTS), slot_bytes


def _placement(
    layout: Layout, rule: UpdateRule, at_home: set[int], slots: tuple[int, int]
) -> StatePlacement:
    num_slots, slot_bytes = slots
    sizes = {group.index: state_bytes(group, rule) for group in layout.subgroups}
    home_bytes = sum(sizes[index] for index in at_home)
    return StatePlacement(
        layout=layout,
        homes=tuple(Tier.HOST if index in at_home else Tier.NVME for index in sizes),
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        host_bytes=home_bytes + num_slots * slot_bytes,
        nvme_bytes=sum(sizes.values()) - home_bytes,
    )


def _too_small(total: int, least: int, memory: HostMemory) -> BudgetError:
    needed = memory.taken_bytes + least
    return BudgetError(
        f"host_memory={format_bytes(memory.budget_bytes)} is too small: at least "
        f"{format_bytes(needed)} ({needed} bytes) are needed for the optimizer state to pass "
        f"through and to be saved, of which {format_bytes(memory.taken_bytes)} are given out; "
        f"{format_bytes(memory.taken_bytes + total)} would hold all of it",
        least_host_bytes=needed,
    )
