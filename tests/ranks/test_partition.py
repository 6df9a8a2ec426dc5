"""Properties of the partition of parameters over ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infinity.parameters.partition import Cut, Share, joined, partition
from swap.plan.layout import PIECE

shares = st.builds(
    lambda rows, row, width, always_on_host: Share(rows * row, width, row, always_on_host),
    st.integers(0, 3000),
    st.sampled_from([1, 3, 64, 300, 1501, 4096]),
    st.sampled_from([4, 12, 14]),
    st.booleans(),
)


@given(st.lists(shares, max_size=12), st.integers(1, 7))
def test_partition_of_any_shares_covers_each_once_at_whole_pieces(
    wanted: list[Share], world_size: int
) -> None:
    for share, cut in zip(wanted, partition(wanted, world_size), strict=True):
        assert cut.numel == share.numel
        if share.always_on_host or world_size == 1:
            assert cut.is_replicated
        if cut.is_replicated:
            assert [cut.length(rank) for rank in range(world_size)] == [share.numel] * world_size
            continue
        assert cut.offsets[0] == 0
        assert cut.offsets[-1] == share.numel
        assert all(low < high for low, high in itertools.pairwise(cut.offsets))
        assert all(offset % PIECE == 0 for offset in cut.offsets[:-1])


@given(st.lists(shares, min_size=1, max_size=40), st.integers(2, 5))
def test_partition_of_any_shares_gives_every_rank_the_same_within_a_unit(
    wanted: list[Share], world_size: int
) -> None:
    held = [0] * world_size
    largest = 0
    for share, cut in zip(wanted, partition(wanted, world_size), strict=True):
        if not cut.is_replicated:
            largest = max(largest, (max(cut.lengths) - min(cut.lengths)) * share.bytes_per_element)
            for rank in range(world_size):
                held[rank] += cut.length(rank) * share.bytes_per_element
    # The last slice may end in a part of a unit, at each parameter again.
    short = sum(share.bytes_per_element * PIECE for share in wanted)
    assert max(held) - min(held) <= largest + short


def test_partition_of_a_large_matrix_is_cut_at_whole_rows() -> None:
    (cut,) = partition([Share(768 * 3072, 12, 768, False)], 2)
    assert cut == Cut(768 * 3072, (0, 768 * 1536, 768 * 3072))


def test_joined_of_ranges_that_meet_is_one() -> None:
    assert joined([(8, 2), (0, 4), (4, 4), (12, 0), (11, 1)]) == [(0, 10), (11, 1)]
