"""What host memory is mapped for: a slab for each purpose, and the slots cut from one of them."""

from __future__ import annotations

import numpy as np

from aio import Slab
from swap.layout import PIECE
from swap.placement import Placement


def slab_sizes(placement: Placement) -> dict[str, int]:
    """A slab for each purpose that takes bytes, so that none can starve another."""
    sizes = {
        "home": placement.state_host_bytes + placement.gradient_host_bytes,
        "arena": placement.arena_bytes,
        "staging": placement.num_slots * placement.slot_bytes,
        "spill": placement.spill_bytes,
        "inbox": placement.inbox_bytes,
        "passage": placement.passage_bytes,
    }
    return {name: -(-nbytes // PIECE) * PIECE for name, nbytes in sizes.items() if nbytes}


def slots_of(slab: Slab, placement: Placement) -> list[np.ndarray]:
    return [slab.allocate(placement.slot_bytes) for _ in range(placement.num_slots)]
