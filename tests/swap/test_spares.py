"""Spare blocks: which subgroups get one, within what is left, and what that does to a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.optim.adamw import AdamRule
from swap.memory.slabs import slab_sizes
from swap.plan.layout import PIECE, ParameterSpec, pack
from swap.plan.placement import Placement, place
from swap.plan.sizes import (
    DEVICE_SCRATCH_BYTES,
    MIN_CHECKPOINT_BYTES,
    gradient_bytes,
    state_bytes,
)
from swap.plan.spares import (
    LEAST_ELEMENTS,
    MOST_ELEMENTS,
    NUM_VISITS,
    choose_spares,
    hidden_elements,
)
from swap.tiers import Budget, BudgetError, Tier
from tests.support.examples import examples

RULE = AdamRule()
KIB = 1024
BOUND = 3.5
"""Layers of which the update may be waited for. With spares for the first layers alone there are up
to 13, with those for the last ones 15.
"""


def _specs(numels: Sequence[int], frozen: Sequence[bool] = ()) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=numel,
            dtype=torch.bfloat16,
            trainable=index >= len(frozen) or not frozen[index],
            always_on_host=numel <= 16 * KIB,
        )
        for index, numel in enumerate(numels)
    ]


numels = st.lists(
    st.one_of(st.integers(0, 20 * KIB), st.integers(0, 3_000 * KIB)), min_size=1, max_size=20
)


def _place(
    specs: Sequence[ParameterSpec],
    host_bytes: int,
    *,
    hides: bool = True,
    device_bytes: int | None = None,
) -> Placement:
    largest = max(spec.padded_numel * spec.dtype.itemsize for spec in specs)
    return place(
        specs,
        RULE,
        Budget(host_bytes=host_bytes, device_bytes=device_bytes),
        least_arena_bytes=largest,
        separate_device=True,
        hides_updates=hides,
    )


def _least(specs: Sequence[ParameterSpec], *, hides: bool) -> int:
    with pytest.raises(BudgetError) as caught:
        _place(specs, 1, hides=hides)
    return caught.value.least_host_bytes


@settings(max_examples=examples(200), deadline=None)
@given(numels=numels, frozen=st.lists(st.booleans(), max_size=20), free=st.integers(0, 1 << 26))
def test_spares_are_of_what_is_trained_and_take_no_more_than_there_is(
    numels: list[int], frozen: list[bool], free: int
) -> None:
    specs = _specs(numels, frozen)
    layout = pack(specs, 256 * KIB)
    wanted = [g for g in layout.subgroups if g.trainable and not g.always_on_host]
    chosen = choose_spares(layout, RULE, free)
    assert sum(chosen.values()) <= free
    assert chosen.keys() <= {group.index for group in wanted}
    assert all(chosen[i] == state_bytes(layout.subgroups[i], RULE) for i in chosen)
    left = free - sum(chosen.values())
    missing = [state_bytes(g, RULE) for g in wanted if g.index not in chosen]
    assert all(nbytes > left for nbytes in missing), "there is room for one more"
    if wanted and state_bytes(wanted[0], RULE) <= free:
        assert wanted[0].index in chosen, "the next forward pass begins with it"


@settings(max_examples=examples(200), deadline=None)
@given(count=st.integers(1, 60), room=st.integers(1, 60))
def test_few_spares_are_spread_over_the_order_of_uses(count: int, room: int) -> None:
    layout = pack(_specs([256 * KIB] * count), 256 * KIB)
    nbytes = state_bytes(layout.subgroups[0], RULE)
    chosen = sorted(choose_spares(layout, RULE, room * nbytes))
    assert len(chosen) == min(room, count)
    edges = [0, *chosen, count - 1]
    widest = max(after - before for before, after in pairwise(edges))
    assert widest <= 2 * -(-count // len(chosen))


def _stall_seconds(spared: set[int], count: int, update: float) -> float:
    """What a forward pass of one second waits for updates, of ``update`` seconds in all, of
    ``count`` layers alike. The backward pass takes two; meanwhile those of ``spared`` layers are
    updated whose gradients are there, the first layer first.
    """
    each, layer = update / count, 2.0 / count
    now, undone = 0.0, dict.fromkeys(range(count), each)
    waiting = set(spared)
    while waiting and now < 2.0:
        ready = [index for index in waiting if (count - index) * layer <= now + 1e-12]
        if not ready:
            now = (count - max(waiting)) * layer
            continue
        waiting.remove(index := min(ready))
        undone[index] -= min(each, 2.0 - now)
        now += each
    finished, stalls, now = 0.0, 0.0, 0.0
    for index in range(count):
        finished += undone[index]
        stalls += max(0.0, finished - now)
        now = max(now, finished) + 1.0 / count
    return stalls


@settings(max_examples=examples(200), deadline=None)
@given(count=st.integers(1, 60), room=st.integers(0, 60), update=st.floats(0.1, 3.0))
def test_spares_that_are_enough_hide_the_update(count: int, room: int, update: float) -> None:
    """That is ``s >= 1 - F / U`` of all, where ``U <= F + B``, up to some layers' worth: the first
    layers' gradients come at the very end, and what is updated is a whole layer.
    """
    layout = pack(_specs([256 * KIB] * count), 256 * KIB)
    nbytes = state_bytes(layout.subgroups[0], RULE)
    spared = set(choose_spares(layout, RULE, room * nbytes))
    stall = _stall_seconds(spared, count, update)
    assert stall <= _stall_seconds(set(), count, update) + 1e-9
    if spared and len(spared) / count >= 1 - 1 / update:
        assert stall <= BOUND * update / count


@settings(max_examples=examples(100), deadline=None)
@given(numels=numels, share=st.floats(0, 2.2))
def test_spares_take_what_nothing_else_can_use(numels: list[int], share: float) -> None:
    specs = _specs(numels)
    least = _least(specs, hides=True)
    assert least == _least(specs, hides=False), "a larger least budget"
    state = sum(14 * spec.padded_numel for spec in specs) + 16 * MIN_CHECKPOINT_BYTES
    budget = least + int(share * state)
    placement, without = _place(specs, budget), _place(specs, budget, hides=False)
    assert placement.host_bytes <= budget
    taken = sum(slab_sizes(placement).values())
    assert taken + placement.scratch_bytes + placement.checkpoint_bytes <= budget
    assert placement.nvme_bytes == without.nvme_bytes
    assert placement.checkpoint_bytes == without.checkpoint_bytes
    if placement.nvme_bytes:
        assert placement == without, "a byte of state in memory is worth more"
    assert all(placement.state_home[index] is Tier.HOST for index in placement.spared)


def test_with_memory_for_it_everything_that_is_trained_has_a_spare() -> None:
    specs = _specs([300 * KIB, 10 * KIB, 2_000 * KIB, 70 * KIB], [False, False, False, True])
    placement = _place(specs, 1 << 30)
    trained = [g for g in placement.layout.subgroups if g.trainable and not g.always_on_host]
    assert placement.spared == {group.index for group in trained}
    assert placement.spare_bytes == sum(state_bytes(group, RULE) for group in trained)


def test_what_is_on_the_device_has_no_spare_and_all_else_has_one() -> None:
    specs = _specs([1_024 * KIB] * 32)
    placement = _place(specs, 1 << 30, device_bytes=200 << 20)
    homes = placement.state_home
    there = {index for index, home in enumerate(homes) if home is Tier.DEVICE}
    assert there
    assert placement.spared == {*range(len(homes))} - there
    assert placement.spared
    tight = _place(specs, placement.host_bytes - (64 << 20), device_bytes=200 << 20)
    assert tight.host_bytes <= placement.host_bytes - (64 << 20)
    assert tight.spared < placement.spared
    assert all(tight.state_home[index] is Tier.HOST for index in tight.spared)


def test_subgroups_are_small_enough_to_be_updated_one_after_the_other() -> None:
    assert hidden_elements(_specs([100 * KIB] * 10), RULE) == LEAST_ELEMENTS
    assert hidden_elements(_specs([1 << 30, 1 << 20]), RULE) == MOST_ELEMENTS
    even = hidden_elements(_specs([32 << 20, 32 << 20]), RULE)
    assert even == 2 << 20
    assert even % PIECE == 0


def test_a_rule_that_takes_whole_parameters_gets_them() -> None:
    class Whole(AdamRule):
        whole_parameters = True

    specs = _specs([5_000 * KIB, 200 * KIB])
    assert hidden_elements(specs, Whole()) == 5_000 * KIB


def test_where_updates_are_not_hidden_there_are_no_spares() -> None:
    placement = _place(_specs([300 * KIB, 2_000 * KIB]), 1 << 30, hides=False)
    assert placement.spared == frozenset()
    assert placement.spare_bytes == 0


@pytest.mark.parametrize("device_gib", [5, 7])
def test_a_device_with_memory_to_spare_has_room_for_updates_of_what_has_a_spare(
    device_gib: int,
) -> None:
    specs = _specs([2 << 20] * 512)
    placement = _place(specs, 64 << 30, device_bytes=device_gib << 30)
    assert placement.spared
    groups = [placement.layout.subgroups[index] for index in placement.spared]
    largest = max(state_bytes(group, RULE) + gradient_bytes(group) for group in groups)
    assert placement.visit_bytes == (NUM_VISITS * largest if device_gib == 7 else 0)
    used = placement.device_bytes + placement.device_home_bytes + placement.visit_bytes
    assert used + DEVICE_SCRATCH_BYTES <= device_gib << 30
    without = _place(specs, 64 << 30, device_bytes=device_gib << 30, hides=False)
    assert not without.visit_bytes
    assert not _place(specs, 64 << 30, device_bytes=64 << 30).visit_bytes, "all is at home there"


@pytest.mark.parametrize(("beside_mib", "has_room"), [(0, False), (360, False), (362, True)])
def test_weights_that_are_computed_with_at_once_have_room_beside_updates(
    beside_mib: int, has_room: bool
) -> None:
    """An update takes 336 MiB and 25 more here, and the largest weights all of the least."""
    specs = _specs([3 << 30, *[16 << 20] * 8])
    placement = _place(specs, 80 << 30, device_bytes=(6 << 30) + (beside_mib << 20))
    assert placement.device_bytes >= 6 << 30
    assert bool(placement.visit_bytes) is has_room


def test_a_device_has_as_much_state_at_home_where_nothing_has_a_spare() -> None:
    specs = _specs([16 << 20] * 64)
    without = _place(specs, 64 << 30, device_bytes=7 << 30, hides=False)
    least = without.host_bytes - without.checkpoint_bytes
    for more_mib in range(0, 1280, 32):
        host_bytes = least + (least >> 4) + (more_mib << 20)
        placement = _place(specs, host_bytes, device_bytes=7 << 30)
        if not placement.state_nvme_bytes and not placement.spared:
            assert placement.state_device_bytes == without.state_device_bytes, more_mib
            assert not placement.visit_bytes
