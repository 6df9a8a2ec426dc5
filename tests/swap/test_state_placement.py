"""Placement of state alone: within the budget, also of what is added later, and all of it used."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.optim.adamw import AdamRule
from swap.plan.layout import PASSAGE_BYTES, ParameterSpec
from swap.plan.placement import Placement
from swap.plan.sizes import MAX_SUBGROUP_ELEMENTS, MIN_CHECKPOINT_BYTES, MIN_SLOTS, state_bytes
from swap.plan.state_placement import Taken, place_state
from swap.tiers import Budget, BudgetError, Tier
from tests.support.examples import examples

RULE = AdamRule()
MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def specs_of(sizes: list[tuple[int, torch.dtype]]) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=numel,
            dtype=dtype,
            trainable=True,
            state_only=True,
        )
        for index, (numel, dtype) in enumerate(sizes)
    ]


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterSpec]:
    numel = st.one_of(st.integers(0, 20_000), st.integers(0, 40 * MIB))
    return specs_of(
        draw(st.lists(st.tuples(numel, st.sampled_from(DTYPES)), min_size=1, max_size=20))
    )


def least_of(specs: list[ParameterSpec], taken: Taken) -> int:
    with pytest.raises(BudgetError) as caught:
        place_state(specs, RULE, Budget(host_bytes=1), taken)
    return caught.value.least_host_bytes


@dataclass
class Shelf:
    """Placements one after the other, and what they take between them."""

    budget: int
    taken: Taken = field(default_factory=Taken)
    checkpoint_bytes: int = 0
    slot_bytes: int = 0

    def add(self, specs: list[ParameterSpec]) -> Placement:
        placement = place_state(specs, RULE, Budget(host_bytes=self.budget), self.taken)
        has_passage = self.taken.slot_bytes or not placement.state_nvme_bytes
        nbytes = placement.state_host_bytes + placement.staging_bytes
        self.slot_bytes = placement.slot_bytes or self.slot_bytes
        self.taken = Taken(
            host_bytes=self.taken.host_bytes + nbytes + (0 if has_passage else PASSAGE_BYTES),
            slot_bytes=self.slot_bytes,
        )
        self.checkpoint_bytes = placement.checkpoint_bytes
        return placement


@settings(max_examples=examples(150), deadline=None)
@given(specs=parameters(), given_out=st.integers(0, 50 * MIB))
def test_least_budget_works_and_a_byte_less_does_not(
    specs: list[ParameterSpec], given_out: int
) -> None:
    taken = Taken(host_bytes=given_out)
    least = least_of(specs, taken)
    assert place_state(specs, RULE, Budget(host_bytes=least), taken).least_host_bytes == least
    with pytest.raises(BudgetError) as caught:
        place_state(specs, RULE, Budget(host_bytes=least - 1), taken)
    assert caught.value.least_host_bytes == least


@settings(max_examples=examples(200), deadline=None)
@given(
    batches=st.lists(parameters(), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_what_is_placed_later_keeps_to_what_is_left(
    batches: list[list[ParameterSpec]], share: float
) -> None:
    least = least_of(batches[0], Taken())
    roomy = least + 16 * sum(spec.padded_numel for specs in batches for spec in specs)
    shelf = Shelf(least + int(share * (roomy - least)))
    for number, specs in enumerate(batches):
        try:
            placement = shelf.add(specs)
        except BudgetError:
            assert number > 0
            return
        assert shelf.taken.host_bytes + shelf.checkpoint_bytes <= shelf.budget
        assert shelf.checkpoint_bytes >= MIN_CHECKPOINT_BYTES
        on_nvme = [
            state_bytes(group, RULE)
            for group, home in zip(placement.layout.subgroups, placement.state_home, strict=True)
            if home is Tier.NVME
        ]
        assert sum(on_nvme) == placement.state_nvme_bytes
        if on_nvme:
            assert max(on_nvme) <= shelf.slot_bytes
            assert placement.num_slots >= MIN_SLOTS or placement.num_slots == 0


def test_state_added_when_memory_is_spent_passes_through_the_slots_that_are_there() -> None:
    large = specs_of([(30 * MIB, torch.float32)])
    shelf = Shelf(64 * MIB)
    assert shelf.add(large).num_slots
    second = shelf.add(large)
    assert second.num_slots == 0
    assert second.state_host_bytes == 0


def test_split_parameter_is_at_home_in_part_so_that_no_memory_is_left_over() -> None:
    specs = specs_of([(64 * MIB, torch.float32)])
    placement = place_state(specs, RULE, Budget(host_bytes=300 * MIB), Taken())
    homes = set(placement.state_home)
    assert homes == {Tier.HOST, Tier.NVME}
    largest = max(state_bytes(group, RULE) for group in placement.layout.subgroups)
    assert 300 * MIB - placement.host_bytes < largest


def test_layout_of_state_is_that_of_whole_models_in_size() -> None:
    specs = specs_of([(64 * MIB, torch.float32)])
    placement = place_state(specs, RULE, Budget(host_bytes=480 * MIB), Taken())
    assert placement.slot_bytes == 8 * MAX_SUBGROUP_ELEMENTS
    lengths = [segment.length for segment in itertools.chain(*placement.layout.segments_of)]
    assert sum(lengths) == 64 * MIB
