"""Which subgroups at home in host memory get a second block, so that their update can begin before
the step is taken: pure, no I/O.

A *spare* block has room for all components of one subgroup. An update writes its new values there
during the backward pass and the two change places when the step is taken; without one, a subgroup
that is in host memory is updated in place, which cannot begin sooner.

How many are worth it. Let an update of everything take U seconds of the CPU, beside a forward pass
of F and a backward pass of B on a device, and let a part s of it have spares. After ``step`` the
rest, (1 - s) U, goes in the order of the forward pass, which waits for nothing if that takes no
longer than F; before ``step``, s U has the backward pass, B, to be done in. So no more than
s = 1 - F / U are needed, and with those the update is hidden as long as U <= F + B. None of these
is known when memory is given out, and a spare that is not needed takes nothing but memory that the
budget allows: so all subgroups get one where there is room.

Where there is not, those that get one are spread evenly over the order of uses, as their gradients
are over the backward pass: of the first layers alone the gradients come last, and nothing of their
update would be done when the step is taken; of the last layers alone, the next forward pass would
begin with all that is left. The very first has one, since that pass begins with it.

Spares come last of all, and only where nothing is on NVMe: a byte of state at home spares
two bytes of traffic a step, which take a disk of 6 GB/s 0.3 ns, and as a part of a spare it hides a
twelfth of an element's update, which takes a CPU of 4 Gparam/s 0.02 ns. What is on NVMe needs none.

On a CPU that computes as well there is nothing to hide behind: see ``placement.place``.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from swap.plan.layout import PIECE, Layout, ParameterSpec
from swap.plan.rules import UpdateRule
from swap.plan.sizes import DEVICE_SCRATCH_BYTES, choose_evenly, slot_bytes_of, state_bytes

LEAST_ELEMENTS = 64 * 1024
MOST_ELEMENTS = 8 * 1024 * 1024
"""An update of so many takes a CPU 2 ms or more, and what is done for a subgroup in Python a tenth
of that. What waits for an update waits for a whole subgroup.
"""
_SUBGROUPS = 32
"""So many at least, unless they would be smaller than the least."""
NUM_VISITS = 3
"""Subgroups that a device updates at once, for their home: one comes, one goes, and one waits for
the thread that sends them, which may be in a kernel.
"""
_VISIT_SHARE = 1 / 16
"""No more of the device's memory than this is taken for them: state at home there is worth more."""


def hidden_elements(specs: Sequence[ParameterSpec], rule: UpdateRule) -> int:
    """Of the largest subgroup where updates are to be hidden and nothing is on NVMe."""
    moving = [spec for spec in specs if not spec.always_on_host]
    even = sum(spec.padded_numel for spec in moving) // _SUBGROUPS // PIECE * PIECE
    elements = max(LEAST_ELEMENTS, min(even, MOST_ELEMENTS))
    if not rule.whole_parameters:
        return elements
    return max([elements, *(spec.padded_numel for spec in moving if spec.trainable)])


def choose_spares(
    layout: Layout, rule: UpdateRule, free_bytes: int, *, on_device: Set[int] = frozenset()
) -> dict[int, int]:
    """The subgroups that get a spare block, and its bytes; no more than ``free_bytes`` in all.
    All units are in host memory, but for those ``on_device``, which need none.
    """
    costs = {
        group.index: state_bytes(group, rule)
        for group in layout.subgroups
        if group.trainable and not (group.always_on_host or group.state_only)
        if group.unit not in on_device
    }
    chosen, left = set(), free_bytes
    for first, nbytes in list(costs.items())[:1]:
        if nbytes <= left:
            chosen.add(first)
            left -= costs.pop(first)
    others, _ = choose_evenly(costs, left)
    return {
        group.index: state_bytes(group, rule)
        for group in layout.subgroups
        if group.index in chosen | others
    }


def visit_bytes(
    layout: Layout,
    rule: UpdateRule,
    device_bytes: int | None,
    state_host_bytes: int,
    weight_bytes: int,
) -> int:
    """Of a device's memory, for ``NUM_VISITS`` of the largest subgroups, beside what updates there
    may take, and ``weight_bytes`` that are computed with at once; 0 where it has no
    ``device_bytes`` to spare for that, where there is little state in host memory, which would be
    at home there as well, or where it does not update.
    """
    if device_bytes is None or not rule.updates_on_device:
        return 0
    moving = [unit for unit in layout.units if unit.trainable and not unit.always_on_host]
    nbytes = NUM_VISITS * max((slot_bytes_of(unit, rule) for unit in moving), default=0)
    most = min(device_bytes, 2 * state_host_bytes) * _VISIT_SHARE
    most = min(most, device_bytes - weight_bytes)
    return nbytes if nbytes + DEVICE_SCRATCH_BYTES <= most else 0
