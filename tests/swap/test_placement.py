"""Placement: every home is decided once, and no budget is exceeded, to the byte."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.optim.adamw import AdamRule
from infinity.optim.rule import FrozenRule
from swap.memory.slabs import slab_sizes
from swap.plan import placement as planner
from swap.plan.layout import PIECE, ParameterSpec, Subgroup
from swap.plan.placement import Placement, place
from swap.plan.rules import UpdateRule
from swap.plan.sizes import (
    DEVICE_SCRATCH_BYTES,
    MIN_CHECKPOINT_BYTES,
    MIN_SLOTS,
    device_weight_bytes,
    gradient_bytes,
    state_bytes,
)
from swap.plan.traffic import traffic_of
from swap.tiers import Budget, BudgetError, Tier
from tests.support.examples import examples
from tests.support.tiers import specs_of


class WholeRule(AdamRule):
    """As rules that run any optimizer: whole parameters, and memory of their own."""

    whole_parameters = True
    scratch_bytes_per_element = 16


RULES: dict[str, UpdateRule] = {
    "adam": AdamRule(),
    "whole": WholeRule(),
    "frozen": FrozenRule(),
}
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    specs: list[ParameterSpec]
    rule: UpdateRule
    least_arena_bytes: int
    separate_device: bool
    verifies: bool = False

    def place(self, host_bytes: int) -> Placement:
        return place(
            self.specs,
            self.rule,
            Budget(host_bytes=host_bytes),
            least_arena_bytes=self.least_arena_bytes,
            separate_device=self.separate_device,
            verifies=self.verifies,
        )

    def least_passing_bytes(self) -> int:
        """What weights pass through: they are computed with there, or only land there."""
        if not self.separate_device:
            return self.least_arena_bytes
        return max(spec.padded_numel * spec.dtype.itemsize for spec in self.specs)

    def least(self) -> int:
        with pytest.raises(BudgetError) as caught:
            self.place(1)
        return caught.value.least_host_bytes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rule = draw(st.sampled_from(sorted(RULES)))
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    one_dtype = draw(st.sampled_from([[dtype] for dtype in dtypes] + [dtypes]))
    drawn = draw(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 20_000), st.integers(0, 40 * MIB)),
                st.sampled_from(one_dtype),
                st.booleans() if rule != "frozen" else st.just(False),
            ),
            min_size=1,
            max_size=30,
        )
    )
    specs = [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=numel,
            dtype=dtype,
            trainable=train,
            always_on_host=numel <= 16 * 1024,
        )
        for index, (numel, dtype, train) in enumerate(drawn)
    ]
    moving = [s.padded_numel * s.dtype.itemsize for s in specs if not s.always_on_host]
    largest = max(moving, default=0)
    arena = draw(st.integers(largest, 3 * largest + draw(st.sampled_from([0, 1, 5000]))))
    return Case(specs, RULES[rule], arena, draw(st.booleans()), draw(st.booleans()))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Case, int, Placement]:
    """A case with a budget that works: the least, one that holds everything, or between."""
    case = draw(cases())
    least = case.least()
    roomy = 2 * least + 16 * sum(spec.padded_numel for spec in case.specs) * 2
    share = draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.01, 0.1, 0.3, 0.6, 1.0]))
    budget = least + int(share * (roomy - least)) + draw(st.integers(0, 5000))
    return case, budget, case.place(budget)


@settings(max_examples=examples(200), deadline=None)
@given(case=cases())
def test_least_budget_works_and_a_byte_less_does_not(case: Case) -> None:
    least = case.least()
    assert case.place(least).least_host_bytes == least
    with pytest.raises(BudgetError) as caught:
        case.place(least - 1)
    assert caught.value.least_host_bytes == least
    assert str(least) in str(caught.value)


@settings(max_examples=examples(300), deadline=None)
@given(placed=placed())
def test_budget_is_never_exceeded(placed: tuple[Case, int, Placement]) -> None:
    _, budget, placement = placed
    assert placement.host_bytes <= budget
    taken = sum(slab_sizes(placement).values())
    assert taken + placement.scratch_bytes + placement.checkpoint_bytes <= budget
    assert placement.checkpoint_bytes >= MIN_CHECKPOINT_BYTES


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("adam", [17_921, 1_075_445]),
        ("whole", [3_869_710, 3_623_804, 4_095_970, 3_848_669, 886_970, 1_502_003, 1_819_178]),
    ],
)
@pytest.mark.parametrize("separate_device", [False, True])
@pytest.mark.parametrize("more", [0, 2_000, 9_000_000])
def test_checksums_of_what_is_in_flight_are_within_the_budget(
    rule: str, sizes: list[int], separate_device: bool, more: int
) -> None:
    """Of few parameters much is in flight beside what is stored."""
    specs = specs_of(sizes)
    largest = max(spec.padded_numel * spec.dtype.itemsize for spec in specs)
    case = Case(specs, RULES[rule], 2 * largest, separate_device, verifies=True)
    budget = case.least() + more
    placement = case.place(budget)
    assert placement.host_bytes <= budget


@settings(max_examples=examples(200), deadline=None)
@given(placed=placed())
def test_homes_hold_exactly_what_is_counted(placed: tuple[Case, int, Placement]) -> None:
    case, _, placement = placed
    held = {(tier, what): 0 for tier in (Tier.HOST, Tier.NVME) for what in ("state", "gradient")}
    groups = placement.layout.subgroups
    homes = zip(groups, placement.state_home, placement.gradient_home, strict=True)
    for group, state, gradient in homes:
        held[state, "state"] += state_bytes(group, case.rule)
        held[gradient, "gradient"] += gradient_bytes(group)
        if group.always_on_host:
            assert (state, gradient) == (Tier.HOST, Tier.HOST)
    assert placement.state_host_bytes == held[Tier.HOST, "state"]
    assert placement.state_nvme_bytes == held[Tier.NVME, "state"]
    assert placement.gradient_host_bytes == held[Tier.HOST, "gradient"]
    assert placement.gradient_nvme_bytes == held[Tier.NVME, "gradient"]


@settings(max_examples=examples(200), deadline=None)
@given(placed=placed())
def test_parts_of_a_parameter_have_one_home(placed: tuple[Case, int, Placement]) -> None:
    """Whoever computes with weights at home needs all of them there."""
    _, _, placement = placed
    homes: dict[int, set[Tier]] = {}
    for group, home in zip(placement.layout.subgroups, placement.state_home, strict=True):
        homes.setdefault(group.unit, set()).add(home)
    assert all(len(tiers) == 1 for tiers in homes.values())


@settings(max_examples=examples(200), deadline=None)
@given(placed=placed())
def test_what_moves_has_slots_that_hold_it_and_an_arena_that_passes_it(
    placed: tuple[Case, int, Placement],
) -> None:
    case, _, placement = placed
    groups = placement.layout.subgroups
    homes = zip(groups, placement.state_home, placement.gradient_home, strict=True)
    for group, state, gradient in homes:
        if Tier.NVME not in (state, gradient):
            continue
        if group.trainable:
            assert placement.num_slots >= MIN_SLOTS
            needed = state_bytes(group, case.rule) + gradient_bytes(group)
            assert placement.slot_bytes >= needed
            assert placement.scratch_bytes >= group.numel * case.rule.scratch_bytes_per_element
        if state is Tier.NVME:
            assert placement.arena_bytes >= case.least_passing_bytes()
        if gradient is Tier.NVME and group.trainable:
            chunk = placement.spill_chunk_bytes
            assert chunk >= PIECE * group.dtype.itemsize
            assert placement.spill_bytes == planner.SPILL_CHUNKS * chunk
    assert placement.arena_bytes % PIECE == 0


@settings(max_examples=examples(100), deadline=None)
@given(placed=placed())
def test_whole_parameters_are_never_split(placed: tuple[Case, int, Placement]) -> None:
    case, _, placement = placed
    if case.rule.whole_parameters:
        for spec in case.specs:
            if spec.trainable:
                assert len(placement.layout.segments_of[spec.index]) == 1


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(), extra=st.lists(st.integers(0, 200 * MIB), min_size=2, max_size=4))
def test_more_budget_never_means_more_traffic_than_everything_on_nvme(
    case: Case, extra: list[int]
) -> None:
    least = case.least()
    for budget in (least + more for more in sorted(extra)):
        placement = case.place(budget)
        everything = placement.state_host_bytes + placement.state_nvme_bytes
        weights = sum(g.numel * g.dtype.itemsize for g in placement.layout.subgroups)
        gradients = placement.gradient_host_bytes + placement.gradient_nvme_bytes
        traffic = traffic_of(placement)
        assert 0 <= traffic.written <= everything + gradients
        assert 0 <= traffic.read <= everything + 2 * weights + gradients


def moved_bytes(placement: Placement) -> int:
    traffic = traffic_of(placement)
    return traffic.read + traffic.written


def test_traffic_falls_and_homes_fill_as_the_budget_grows() -> None:
    specs = [
        ParameterSpec(
            index=i,
            name=f"p{i}",
            numel=MIB,
            dtype=torch.bfloat16,
            trainable=True,
            always_on_host=False,
        )
        for i in range(64)
    ]
    case = Case(specs, AdamRule(), 4 * MIB, separate_device=False)
    least, everything = case.least(), 64 * 14 * MIB + MIN_CHECKPOINT_BYTES
    budgets = [least + (everything - least) * tenth // 10 for tenth in range(11)]
    placements = [case.place(budget) for budget in budgets]
    for less, more in itertools.pairwise(placements):
        assert moved_bytes(more) <= moved_bytes(less)
    assert placements[0].state_nvme_bytes == 64 * 12 * MIB
    assert placements[-1].nvme_bytes == 0
    assert moved_bytes(placements[-1]) == 0
    half = placements[5]
    homes = [home is Tier.HOST for home in half.state_home]
    assert homes == sorted(homes, reverse=True), "what is used first is at home in memory"
    assert 0 < sum(homes) < len(homes)
    homes = [home is Tier.HOST for home in placements[1].gradient_home]
    quarters = [sum(homes[q * len(homes) // 4 : (q + 1) * len(homes) // 4]) for q in range(4)]
    assert max(quarters) - min(quarters) <= 1 + len(homes) // 16, "gradients are spread evenly"


def test_device_budget_bounds_the_arena_on_a_cpu() -> None:
    specs = [
        ParameterSpec(
            index=i,
            name=f"p{i}",
            numel=MIB,
            dtype=torch.float32,
            trainable=True,
            always_on_host=False,
        )
        for i in range(32)
    ]
    budget = Budget(host_bytes=150 * MIB, device_bytes=20 * MIB)
    placement = place(specs, AdamRule(), budget, least_arena_bytes=8 * MIB)
    assert 8 * MIB <= placement.arena_bytes <= 20 * MIB
    assert placement.host_bytes <= budget.host_bytes


@settings(max_examples=examples(200), deadline=None)
@given(
    case=cases(),
    device=st.one_of(st.integers(0, 400 * MIB), st.integers(0, 8192 * MIB)),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    hides=st.booleans(),
)
def test_device_budget_is_never_exceeded_and_what_is_at_home_there_can_be(
    case: Case, device: int, share: float, hides: bool
) -> None:
    case = dataclasses.replace(case, separate_device=True)
    least = case.least()
    roomy = 2 * least + 16 * sum(spec.padded_numel for spec in case.specs)
    budget = Budget(
        host_bytes=least + int(share * (roomy - least)),
        device_bytes=max(device, case.least_arena_bytes),
    )
    placement = place(
        case.specs,
        case.rule,
        budget,
        least_arena_bytes=case.least_arena_bytes,
        separate_device=True,
        hides_updates=hides,
    )
    assert budget.device_bytes is not None
    taken = placement.device_bytes + placement.device_home_bytes + placement.visit_bytes
    assert taken <= budget.device_bytes
    if placement.visit_bytes:
        assert placement.spared
        assert taken + DEVICE_SCRATCH_BYTES <= budget.device_bytes
    assert placement.host_bytes <= budget.host_bytes
    groups = placement.layout.subgroups
    there = [group for group in groups if placement.state_home[group.index] is Tier.DEVICE]
    assert all(not g.trainable or case.rule.updates_on_device for g in there)
    assert not any(g.always_on_host for g in there)
    assert all(placement.gradient_home[g.index] is Tier.DEVICE for g in there)
    assert placement.state_device_bytes == sum(state_bytes(g, case.rule) for g in there)
    assert placement.gradient_device_bytes == sum(map(gradient_bytes, there))
    if any(g.trainable for g in there):
        assert taken + DEVICE_SCRATCH_BYTES <= budget.device_bytes
    elsewhere = [s for s in case.specs if s.index not in _parameters(there)]
    weights = sum(map(device_weight_bytes, elsewhere))
    assert placement.device_bytes >= min(weights, case.least_arena_bytes)


def _parameters(groups: list[Subgroup]) -> set[int]:
    return {segment.parameter for group in groups for segment in group.segments}


def test_state_goes_to_the_device_when_it_has_room_for_all_weights() -> None:
    specs = [
        ParameterSpec(index=i, name=f"p{i}", numel=MIB, dtype=torch.bfloat16, trainable=True)
        for i in range(64)
    ]

    def homes(host_bytes: int, device_bytes: int) -> list[Tier]:
        budget = Budget(host_bytes=host_bytes, device_bytes=device_bytes)
        placement = place(
            specs, AdamRule(), budget, least_arena_bytes=8 * MIB, separate_device=True
        )
        tiers = list(placement.state_home)
        assert tiers == sorted(tiers, key=list(Tier).index), "what is used first is nearest"
        return tiers

    for host_bytes in (64 * MIB, 400 * MIB, 2048 * MIB):
        assert Tier.DEVICE not in homes(host_bytes, 150 * MIB)  # weights are 128 MiB
        assert set(homes(host_bytes, 2048 * MIB)) == {Tier.DEVICE}
    assert {*homes(400 * MIB, 300 * MIB)} == {*Tier}
    assert {*homes(2048 * MIB, 300 * MIB)} == {Tier.DEVICE, Tier.HOST}


def test_of_state_that_of_what_is_used_first_is_at_home_on_the_device() -> None:
    """A table of embeddings, of which the gradient comes last, and not the head, which is as large
    and comes first.
    """
    specs = specs_of([16 * MIB, *[8 * MIB] * 4, 16 * MIB])
    weights_of_others, largest = 4 * 48 * MIB, 4 * 16 * MIB
    state_and_gradients = (4 + 8 + 4) * 16 * MIB
    room = weights_of_others + 2 * largest + state_and_gradients + 32 * MIB
    budget = Budget(host_bytes=4096 * MIB, device_bytes=room)
    placement = place(specs, AdamRule(), budget, least_arena_bytes=8 * MIB, separate_device=True)
    there = [g for g in placement.layout.subgroups if placement.state_home[g.index] is Tier.DEVICE]
    assert _parameters(there) == {0}


@pytest.mark.parametrize("more", [0, 1, 1 << 20])
def test_scales_of_many_small_parameters_are_within_the_budget(more: int) -> None:
    """Each subgroup of them takes whole pages for its own."""
    specs = specs_of([16384] * 400 + [4 * MIB], always_on_host=set(range(400)))
    rule = AdamRule(state_dtype=torch.uint8)
    case = Case(specs, rule, least_arena_bytes=32 * MIB, separate_device=False)
    budget = case.least() + more
    assert case.place(budget).host_bytes <= budget
