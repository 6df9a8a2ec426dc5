"""Host memory, mapped as a slab for each purpose, and the staging slots cut from one of them."""

from __future__ import annotations

import numpy as np

from aio import Slab
from swap.plan.layout import PIECE
from swap.plan.placement import Placement


def slab_sizes(placement: Placement) -> dict[str, int]:
    """A slab for each purpose that takes bytes, so that none can starve another."""
    sizes = {
        "home": placement.state_host_bytes + placement.spare_bytes + placement.gradient_host_bytes,
        "arena": placement.arena_bytes,
        "staging": placement.num_slots * placement.slot_bytes,
        "spill": placement.spill_bytes,
        "inbox": placement.inbox_bytes,
        "passage": placement.passage_bytes,
        "bridge": placement.bridge_bytes,
    }
    return {name: -(-nbytes // PIECE) * PIECE for name, nbytes in sizes.items() if nbytes}


_SEEN_BY_USERS = ("home", "arena")
"""Weights are computed with in these, and a program may keep views of them; a forked child has them
as they were. The rest is passed through, and no child has any use for it."""


def slab_of(name: str, nbytes: int) -> Slab:
    """The slab for a purpose."""
    return Slab(nbytes, inherited=name in _SEEN_BY_USERS)


def slots_of(slab: Slab | None, placement: Placement) -> list[np.ndarray]:
    """None where nothing is staged, and there is no slab for that."""
    if slab is None:
        return []
    return [slab.allocate(placement.slot_bytes) for _ in range(placement.num_slots)]
