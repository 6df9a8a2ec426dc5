"""Homes where no steps are taken, and what passes of inference read then."""

from itertools import pairwise

import pytest
import torch

from infinity.optim.rule import FrozenRule
from swap.plan.layout import PIECE, ParameterSpec
from swap.plan.placement import place
from swap.plan.traffic import traffic_of
from swap.tiers import Budget, BudgetError, Tier

MIB = 1 << 20


@pytest.mark.parametrize("trainable", [False, True])
def test_where_no_steps_are_taken_weights_have_the_memory_spread_evenly(trainable: bool) -> None:
    specs = [
        ParameterSpec(index=i, name=f"p{i}", numel=MIB, dtype=torch.bfloat16, trainable=trainable)
        for i in range(64)
    ]
    arena = 8 * MIB
    with pytest.raises(BudgetError) as caught:
        place(specs, FrozenRule(), Budget(host_bytes=0), least_arena_bytes=arena)
    budget = Budget(host_bytes=caught.value.least_host_bytes + 80 * MIB)
    placement = place(specs, FrozenRule(), budget, least_arena_bytes=arena)
    beside = placement.staging_bytes + placement.checkpoint_bytes
    assert placement.state_host_bytes >= 80 * MIB - arena - beside - 4 * MIB
    assert placement.arena_bytes <= 2 * arena + 4 * PIECE
    assert placement.gradient_host_bytes == 0
    homes = [home is Tier.HOST for home in placement.state_home]
    quarters = [sum(homes[q * len(homes) // 4 : (q + 1) * len(homes) // 4]) for q in range(4)]
    assert min(quarters) > 0
    assert max(quarters) - min(quarters) <= 1
    traffic = traffic_of(placement, backward_passes=0)
    assert traffic.read == placement.state_nvme_bytes
    assert traffic.written == 0


@pytest.mark.parametrize("numel", [MIB // 16, MIB // 4])
def test_of_small_models_too_memory_beyond_the_least_has_weights(numel: int) -> None:
    """In units of 8 MiB the most part of some 10 MiB had no use."""
    specs = [
        ParameterSpec(index=i, name=f"p{i}", numel=numel, dtype=torch.float32, trainable=False)
        for i in range(16 * MIB // 4 // numel)
    ]
    arena = 2 * MIB
    with pytest.raises(BudgetError) as caught:
        place(specs, FrozenRule(), Budget(host_bytes=0), least_arena_bytes=arena)
    least = caught.value.least_host_bytes
    more = [MIB * half // 2 for half in range(40)]
    placements = [
        place(specs, FrozenRule(), Budget(host_bytes=least + room), least_arena_bytes=arena)
        for room in more
    ]
    for room, placement in zip(more, placements, strict=True):
        assert placement.state_host_bytes >= min(16 * MIB, room - arena - MIB)
    read = [traffic_of(placement, backward_passes=0).read for placement in placements]
    assert all(fewer <= before + 4 * numel for before, fewer in pairwise(read))
