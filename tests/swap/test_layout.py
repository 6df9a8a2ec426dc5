"""The invariants of the layout, over any parameters."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from swap.plan.layout import PIECE, ParameterSpec, Subgroup, neighbours, pack, pad, split_evenly

sizes = st.one_of(
    st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1]),
    st.integers(0, 3 * PIECE),
    st.integers(0, 40 * PIECE),
)


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterSpec]:
    drawn = draw(
        st.lists(
            st.tuples(
                sizes,
                st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
                st.booleans(),
                st.booleans(),
            ),
            max_size=20,
        )
    )
    return [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=n,
            dtype=dtype,
            trainable=train,
            always_on_host=stay,
        )
        for index, (n, dtype, train, stay) in enumerate(drawn)
    ]


capacities = st.integers(1, 12).map(lambda pieces: pieces * PIECE)


@given(specs=parameters(), capacity=capacities)
def test_segments_cover_each_parameter_once_and_in_order(
    specs: list[ParameterSpec], capacity: int
) -> None:
    layout = pack(specs, capacity)
    assert layout.specs == tuple(specs)
    for spec, segments in zip(specs, layout.segments_of, strict=True):
        assert segments
        assert all(segment.parameter == spec.index for segment in segments)
        reached = 0
        for segment in segments:
            assert segment.start == reached
            reached += segment.length
        assert reached == spec.numel


@given(specs=parameters(), capacity=capacities)
def test_segments_are_aligned_and_disjoint_in_their_subgroup(
    specs: list[ParameterSpec], capacity: int
) -> None:
    layout = pack(specs, capacity)
    found = set()
    for index, group in enumerate(layout.subgroups):
        assert group.index == index
        assert group.numel % PIECE == 0
        used = 0
        for segment in group.segments:
            assert segment.subgroup == index
            assert segment.start % PIECE == 0
            assert segment.offset % PIECE == 0
            assert segment.offset >= used
            used = segment.offset + pad(segment.length)
            found.add(segment)
        assert used == group.numel
    assert found == {segment for segments in layout.segments_of for segment in segments}


@given(specs=parameters(), capacity=capacities)
def test_subgroups_keep_to_the_capacity_and_to_one_kind(
    specs: list[ParameterSpec], capacity: int
) -> None:
    layout = pack(specs, capacity)
    for group in layout.subgroups:
        assert 0 < group.numel <= capacity
        for segment in group.segments:
            spec = specs[segment.parameter]
            assert (spec.dtype, spec.trainable) == (group.dtype, group.trainable)
            assert spec.always_on_host is group.always_on_host


@given(specs=parameters(), capacity=capacities)
def test_only_a_parameter_larger_than_a_subgroup_is_split_and_is_then_a_unit(
    specs: list[ParameterSpec], capacity: int
) -> None:
    layout = pack(specs, capacity)
    for spec in specs:
        parts = layout.subgroups_of(spec.index)
        if spec.padded_numel <= capacity:
            assert len(parts) == 1
            continue
        assert len(parts) == len(list(split_evenly(spec.numel, capacity)))
        assert all(len(layout.subgroups[part].segments) == 1 for part in parts)
        assert len({layout.subgroups[part].unit for part in parts}) == 1
    units: dict[int, list[Subgroup]] = {}
    for group in layout.subgroups:
        units.setdefault(group.unit, []).append(group)
    for groups in units.values():
        if len(groups) > 1:
            assert len({s.parameter for g in groups for s in g.segments}) == 1


@given(specs=parameters(), capacity=capacities)
def test_parts_of_a_unit_lie_next_to_one_another(specs: list[ParameterSpec], capacity: int) -> None:
    """Arrays are mapped by unit, and a split parameter must be contiguous in one."""
    layout = pack(specs, capacity)
    for segments in layout.segments_of:
        indices = [segment.subgroup for segment in segments]
        assert indices == sorted(indices)
        if len(segments) > 1:
            assert all(segment.offset == 0 for segment in segments)
            groups = [layout.subgroups[index] for index in indices]
            assert [g.numel for g in groups[:-1]] == [s.length for s in segments[:-1]]


@given(specs=parameters(), capacity=capacities)
def test_subgroups_are_in_the_order_of_their_first_parameter(
    specs: list[ParameterSpec], capacity: int
) -> None:
    layout = pack(specs, capacity)
    firsts = [(g.segments[0].parameter, g.segments[0].start) for g in layout.subgroups]
    assert firsts == sorted(firsts)


@given(numel=st.integers(0, 1000 * PIECE), pieces=st.integers(1, 50))
def test_split_evenly_gives_the_fewest_parts_of_nearly_the_same_size(
    numel: int, pieces: int
) -> None:
    most = pieces * PIECE
    parts = list(split_evenly(numel, most))
    assert len(parts) == -(-pad(numel) // most)
    padded = [pad(length) for _, length in parts]
    assert max(padded) <= most
    assert max(padded) - min(padded) <= PIECE
    assert sum(length for _, length in parts) == numel


@given(numel=st.integers(0, 1 << 40))
def test_pad_is_the_least_whole_number_of_pieces(numel: int) -> None:
    padded = pad(numel)
    assert padded % PIECE == 0
    assert padded >= max(numel, 1)
    assert padded - PIECE < max(numel, 1)


@given(specs=parameters(), capacity=capacities)
def test_neighbours_share_a_subgroup(specs: list[ParameterSpec], capacity: int) -> None:
    layout = pack(specs, capacity)
    for spec, others in zip(specs, neighbours(layout), strict=True):
        shared = set(layout.subgroups_of(spec.index))
        assert list(others) == [
            other.index for other in specs if shared & set(layout.subgroups_of(other.index))
        ]


@given(specs=parameters(), capacity=capacities)
def test_units_count_what_their_subgroups_are(specs: list[ParameterSpec], capacity: int) -> None:
    layout = pack(specs, capacity)
    assert sorted(index for unit in layout.units for index in unit.parameters) == [
        *range(len(specs))
    ]
    for index, unit in enumerate(layout.units):
        groups = [group for group in layout.subgroups if group.unit == index]
        assert unit.index == index
        assert [group.index for group in groups] == [
            *range(unit.first, unit.first + unit.num_subgroups)
        ]
        assert Counter(group.numel for group in groups) == dict(unit.sizes)
        assert (unit.numel, unit.largest) == (
            sum(group.numel for group in groups),
            max(group.numel for group in groups),
        )


def test_a_layout_makes_no_subgroups_before_they_are_asked_for() -> None:
    numel = 10**12
    spec = ParameterSpec(index=0, name="p", numel=numel, dtype=torch.float32, trainable=True)
    layout = pack([spec], 2**21)
    (unit,) = layout.units
    assert unit.numel == pad(numel)
    assert "subgroups" not in vars(layout)
