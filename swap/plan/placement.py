"""Which tier is assigned to which bytes under a budget: pure, no I/O.

Memory of a device comes first, see ``homes``. Host memory is given out in this order: what must be
there (small parameters with their state, the update's staging slots, the arena that weights pass
through, spill buffers), then gradients, then optimizer state with its weights, then a larger arena;
where all of these are in memory, then spare blocks (see ``spares``). A byte of gradient or of state
in host memory spares two bytes of traffic a step; a byte of arena spares one at most, and only
while it is not evicted.

Tiers are assigned to whole units (see ``layout``). Gradients in host memory are spread evenly over
the order of execution, so that spills are spread over the backward pass. State in host memory is
that of what is used first: a backward pass ends with the first layers and the next forward pass
begins with them, so that on NVMe their update would have no time at all, while that of the last
layers has nearly all of a step.

Where no steps are taken weights come first, and gradients, which there may be none of, last. As one
pass follows the other, what the arena holds of more weights than it has room for is gone when its
turn comes again: it is for reading ahead, and weights at home, spread evenly, spare reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swap.plan.homes import BRIDGE_BYTES, NONE_ON_DEVICE, DeviceHomes, homes_beside, homes_of
from swap.plan.layout import PASSAGE_BYTES, PIECE, Layout, ParameterSpec, Unit, pack
from swap.plan.rules import UpdateRule
from swap.plan.sizes import (
    DEVICE_SCRATCH_BYTES,
    MAX_SLOTS,
    MIN_CHECKPOINT_BYTES,
    MIN_SLOTS,
    STAGING_SHARE,
    capacity_for_whole,
    checkpoint_bytes,
    checksum_bytes,
    choose_homes,
    device_sizes,
    device_sum_bytes,
    fixed_bytes,
    gradient_bytes,
    least_elements,
    least_staging_bytes,
    scratch_bytes_of,
    slot_bytes_of,
    subgroup_elements,
    total_bytes,
    unit_state_bytes,
)
from swap.plan.spares import choose_spares, hidden_elements, visit_bytes
from swap.tiers import Budget, Tier, format_bytes, too_small

SPILL_CHUNKS = 4
MIN_SPILL_CHUNK_BYTES = 256 * 1024
MAX_SPILL_CHUNK_BYTES = 4 * 1024 * 1024
ARENA_SHARE = 0.35
MOST_READ_AHEAD_BYTES = 64 * 1024 * 1024
"""Of a pass of inference: what an SSD reads in some 30 ms, in which modules compute unevenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The homes of all bytes. Sizes in bytes; tuples are indexed by subgroup. ``device_bytes``: of
    a device with memory of its own, for weights that are at home elsewhere; ``verifies``: with
    checksums of what is on NVMe; ``spared``: subgroups in host memory with a second block;
    ``visit_bytes``: of a device, for updates of these.
    """

    layout: Layout
    state_home: tuple[Tier, ...]
    gradient_home: tuple[Tier, ...]
    arena_bytes: int
    num_slots: int
    slot_bytes: int
    scratch_bytes: int
    spill_chunk_bytes: int
    least_host_bytes: int = 0
    checkpoint_bytes: int = 0
    inbox_bytes: int = 0
    device_bytes: int = 0
    state_device_bytes: int = 0
    gradient_device_bytes: int = 0
    verifies: bool = False
    spared: frozenset[int] = frozenset()
    spare_bytes: int = 0
    visit_bytes: int = 0
    state_host_bytes: int
    gradient_host_bytes: int
    state_nvme_bytes: int
    gradient_nvme_bytes: int

    @property
    def staging_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.scratch_bytes

    @property
    def spill_bytes(self) -> int:
        return SPILL_CHUNKS * self.spill_chunk_bytes if self.gradient_nvme_bytes else 0

    @property
    def device_home_bytes(self) -> int:
        """Of the memory of a device, what is at home there, with sums of squares of gradients."""
        sums = sum(map(device_sum_bytes, self.units_on_device))
        return self.state_device_bytes + self.gradient_device_bytes + sums

    @property
    def bridge_bytes(self) -> int:
        """What values go through between a device, as their home, and a program or an SSD."""
        return BRIDGE_BYTES if Tier.DEVICE in self.state_home else 0

    @property
    def passage_bytes(self) -> int:
        return PASSAGE_BYTES if self.state_nvme_bytes or self.gradient_nvme_bytes else 0

    @property
    def checksum_bytes(self) -> int:
        """For files that hold the old and the new state of a step at once."""
        return checksum_bytes(self.nvme_wanted_bytes) if self.verifies else 0

    @property
    def host_bytes(self) -> int:
        """All host memory that will be taken."""
        return (
            self.state_host_bytes
            + self.spare_bytes
            + self.gradient_host_bytes
            + self.arena_bytes
            + self.staging_bytes
            + self.spill_bytes
            + self.checkpoint_bytes
            + self.inbox_bytes
            + self.passage_bytes
            + self.bridge_bytes
            + self.checksum_bytes
        )

    @property
    def nvme_bytes(self) -> int:
        """Swap files of this size are enough: state, spilled gradients, and copies in flight."""
        if not (self.state_nvme_bytes or self.gradient_nvme_bytes):
            return 0
        return self.state_nvme_bytes + self.gradient_nvme_bytes + 2 * self.staging_bytes

    @property
    def nvme_wanted_bytes(self) -> int:
        """Swap files of this size hold the old and the new state of a step at once, as they do
        where subgroups are updated before the step is taken.
        """
        return self.nvme_bytes + self.rewritten_nvme_bytes

    @property
    def units_on_nvme(self) -> list[Unit]:
        """Those whose state is at home there."""
        return self._units_in(Tier.NVME)

    @property
    def units_on_device(self) -> list[Unit]:
        """Those whose state is at home on a device with memory of its own."""
        return self._units_in(Tier.DEVICE)

    def _units_in(self, tier: Tier) -> list[Unit]:
        return [unit for unit in self.layout.units if self.state_home[unit.first] is tier]

    @property
    def rewritten_nvme_bytes(self) -> int:
        """State on NVMe that a step writes anew: all but frozen weights."""
        frozen = sum(
            unit.numel * unit.dtype.itemsize for unit in self.units_on_nvme if not unit.trainable
        )
        return self.state_nvme_bytes - frozen


def place(
    specs: Sequence[ParameterSpec],
    rule: UpdateRule,
    budget: Budget,
    *,
    least_arena_bytes: int,
    separate_device: bool = False,
    verifies: bool = False,
    hides_updates: bool = False,
) -> Placement:
    """Decide every home.

    ``least_arena_bytes`` is what weights need to pass through: the modules that are at work at once
    and the next one. Raises ``BudgetError`` with the least budget that works when ``budget`` is
    below it. ``separate_device``: weights are computed from memory that is not the host's.
    ``verifies``: with room for checksums of what is on NVMe. ``hides_updates``: updates of what is
    in host memory are to begin during the backward pass, where there is memory for that. It makes
    them cost more, and is for a processor that would wait meanwhile.
    """
    apart = device_sizes(specs, budget.device_bytes) if separate_device else None
    # To a device weights only pass through host memory.
    least_arena = _whole_pages(apart.least_landing_bytes if apart else least_arena_bytes + PIECE)
    inbox = apart.inbox_bytes if apart else 0
    everything = pack(specs, capacity_for_whole(specs))
    total = total_bytes(everything, rule) + inbox
    sums = _least_checksum_bytes(specs, rule) if verifies else 0
    at_work = min(total, _least_host_bytes(specs, rule, least_arena) + inbox + sums)
    least = at_work + MIN_CHECKPOINT_BYTES
    room = budget.device_bytes if apart and budget.host_bytes >= least + BRIDGE_BYTES else None
    cache = apart.device_bytes if apart else 0
    homes_in = partial(homes_beside, rule=rule, device_bytes=room, cache_bytes=cache)
    at_home = homes_in(everything)
    needed = total - at_home.nbytes + (BRIDGE_BYTES if at_home.units else 0)
    if needed + MIN_CHECKPOINT_BYTES <= budget.host_bytes:
        aside = checkpoint_bytes(budget.host_bytes, needed)
        placement = all_in_host(everything, rule, at_home)
        if hides_updates:
            left = budget.host_bytes - inbox - aside
            placement = _hiding(specs, rule, placement, homes_in, room, left, least_arena_bytes)
        return replace(placement, least_host_bytes=least, checkpoint_bytes=aside, inbox_bytes=inbox)
    if budget.host_bytes < least:
        of_weights = "on their way to the device" if apart else "of the largest block at work"
        arena_for = f"{format_bytes(least_arena)} for the weights {of_weights}"
        raise too_small(budget, least, arena_for, total + MIN_CHECKPOINT_BYTES)
    bridge = BRIDGE_BYTES if room else 0
    at_work += bridge
    aside = checkpoint_bytes(budget.host_bytes, at_work)
    ahead = math.inf if rule.takes_steps else min(least_arena, MOST_READ_AHEAD_BYTES)
    most = apart.most_landing_bytes if apart else least_arena + ahead
    while True:
        # Memory is taken by pages: an arena of what is left is not rounded up beyond the budget.
        beside = inbox + sums + PASSAGE_BYTES + bridge
        host_bytes = (budget.host_bytes - aside - beside) // PIECE * PIECE
        layout = pack(specs, subgroup_elements(specs, rule, host_bytes - least_arena))
        spare = host_bytes + beside - at_work
        filled = _fill(layout, rule, host_bytes, least_arena, spare, most, homes_in(layout))
        placement = replace(filled, verifies=verifies)
        if placement.checksum_bytes <= sums:
            break
        sums = placement.checksum_bytes  # of more in flight, where more is staged than the least
    if budget.device_bytes is not None and not separate_device:
        # On a CPU the arena is the device.
        arena = max(least_arena, min(placement.arena_bytes, budget.device_bytes))
        placement = replace(placement, arena_bytes=arena)
    return replace(placement, least_host_bytes=least, checkpoint_bytes=aside, inbox_bytes=inbox)


def _hiding(
    specs: Sequence[ParameterSpec],
    rule: UpdateRule,
    placement: Placement,
    homes_in: Callable[..., DeviceHomes],
    device_bytes: int | None,
    host_bytes: int,
    weight_bytes: int,
) -> Placement:
    """Of all state in memory, with room for updates that begin before their step."""
    finer = pack(specs, hidden_elements(specs, rule))
    others = all_in_host(finer, rule, homes_in(finer))
    visits = visit_bytes(finer, rule, device_bytes, others.state_host_bytes, weight_bytes)
    taken = visits + DEVICE_SCRATCH_BYTES if visits else 0
    fewer = homes_in(finer, device_bytes=device_bytes and device_bytes - taken)
    visited = replace(all_in_host(finer, rule, fewer), visit_bytes=visits)
    return _with_spares(visited, others, placement, rule=rule, host_bytes=host_bytes)


def _with_spares(*placements: Placement, rule: UpdateRule, host_bytes: int) -> Placement:
    """The first of these that fits, with spare blocks where the device updates what has some, or
    the last one, which does: nothing on NVMe, and spare blocks in what is left of ``host_bytes``.
    """
    for placement in placements:
        there = {unit.index for unit in placement.units_on_device}
        free_bytes = host_bytes - placement.host_bytes
        spares = choose_spares(placement.layout, rule, free_bytes, on_device=there)
        if free_bytes >= 0 and (spares or not placement.visit_bytes):
            break
    return replace(placement, spared=frozenset(spares), spare_bytes=sum(spares.values()))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PIECE) * PIECE


def all_in_host(
    layout: Layout, rule: UpdateRule, at_home: DeviceHomes = NONE_ON_DEVICE
) -> Placement:
    """But for what is ``at_home`` on a device."""
    every = {unit.index for unit in layout.units}
    tiers = homes_of(layout.units, every, at_home.units)
    state = sum(unit_state_bytes(unit, rule) for unit in layout.units)
    return Placement(
        layout=layout,
        state_home=tiers,
        gradient_home=tiers,
        device_bytes=at_home.cache_bytes,
        state_device_bytes=at_home.state_bytes,
        gradient_device_bytes=at_home.gradient_bytes,
        arena_bytes=0,
        num_slots=0,
        slot_bytes=0,
        scratch_bytes=scratch_bytes_of(layout, rule),
        spill_chunk_bytes=0,
        state_host_bytes=state - at_home.state_bytes,
        gradient_host_bytes=sum(map(gradient_bytes, layout.units)) - at_home.gradient_bytes,
        state_nvme_bytes=0,
        gradient_nvme_bytes=0,
    )


def _least_host_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule, least_arena: int) -> int:
    staging = least_staging_bytes(specs, rule)
    spill = SPILL_CHUNKS * MIN_SPILL_CHUNK_BYTES
    return fixed_bytes(specs, rule) + staging + spill + least_arena + PASSAGE_BYTES


def _least_checksum_bytes(specs: Sequence[ParameterSpec], rule: UpdateRule) -> int:
    """For swap files of the least budget: all in the smallest subgroups, the old and the new state
    of a step at once, and copies in flight.
    """
    finest = total_bytes(pack(specs, least_elements(specs, rule)), rule)
    return checksum_bytes(2 * (finest + least_staging_bytes(specs, rule)))


def _fill(
    layout: Layout,
    rule: UpdateRule,
    host_bytes: int,
    least_arena: int,
    spare: int,
    most_arena: float,
    at_home: DeviceHomes,
) -> Placement:
    states = {unit.index: unit_state_bytes(unit, rule) for unit in layout.units}
    gradients = {unit.index: gradient_bytes(unit) for unit in layout.units}
    in_host = {unit.index for unit in layout.units if unit.always_on_host}
    fixed = sum(states[unit] + gradients[unit] for unit in in_host)
    moving = [unit for unit in layout.units if unit.index not in in_host | at_home.units]
    spilling = [unit for unit in moving if unit.trainable]
    updated = spilling if rule.takes_steps else []
    slot_bytes = max((slot_bytes_of(unit, rule) for unit in updated), default=0)
    scratch = scratch_bytes_of(layout, rule)
    chunk = _spill_chunk_bytes(spare if updated else 0) if spilling else 0
    left = host_bytes - fixed - SPILL_CHUNKS * chunk - scratch - least_arena
    num_slots = slots_within(left, slot_bytes)
    left -= num_slots * slot_bytes
    weights = int(min(most_arena, sum(unit.numel * unit.dtype.itemsize for unit in moving)))
    extra = max(0, min(int(left * ARENA_SHARE), weights - least_arena))
    left -= extra
    gradient_home, state_home, left = choose_homes(
        {unit.index: gradients[unit.index] for unit in moving},
        {unit.index: states[unit.index] for unit in moving},
        left,
        takes_steps=rule.takes_steps,
    )
    arena = min(least_arena + extra + max(0, left), max(weights + PIECE, least_arena))
    gradients_in_host, states_in_host = in_host | gradient_home, in_host | state_home
    state_host_bytes = sum(states[unit] for unit in states_in_host)
    gradient_host_bytes = sum(gradients[unit] for unit in gradients_in_host)
    return Placement(
        layout=layout,
        state_home=homes_of(layout.units, states_in_host, at_home.units),
        gradient_home=homes_of(layout.units, gradients_in_host, at_home.units),
        device_bytes=at_home.cache_bytes,
        state_device_bytes=at_home.state_bytes,
        gradient_device_bytes=at_home.gradient_bytes,
        arena_bytes=arena,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        scratch_bytes=scratch,
        spill_chunk_bytes=chunk,
        state_host_bytes=state_host_bytes,
        gradient_host_bytes=gradient_host_bytes,
        state_nvme_bytes=sum(states.values()) - state_host_bytes - at_home.state_bytes,
        gradient_nvme_bytes=(
            sum(gradients.values()) - gradient_host_bytes - at_home.gradient_bytes
        ),
    )


def slots_within(free_bytes: int, slot_bytes: int) -> int:
    """How many slots of that size are to be made; none of size 0."""
    if not slot_bytes:
        return 0
    return MAX_SLOTS if MAX_SLOTS * slot_bytes <= free_bytes * STAGING_SHARE else MIN_SLOTS


def _spill_chunk_bytes(spare: int) -> int:
    """Larger writes, where the budget has more to spare than the least."""
    chunk = spare // 32 // PIECE * PIECE
    return max(MIN_SPILL_CHUNK_BYTES, min(chunk, MAX_SPILL_CHUNK_BYTES))
