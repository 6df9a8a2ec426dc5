"""Blocks over ranks beside what else their process group is used for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import rank_groups
from tests.support.ranks import run_ranks


def test_models_of_one_group_on_threads_compute_with_their_own_weights(tmp_path: Path) -> None:
    for given in run_ranks(rank_groups.outputs_by_threads, tmp_path, 2):
        assert given == [512.0, 1024.0]


@pytest.mark.parametrize("gives_up", [[0, 1, 2], [1]])
def test_group_that_is_destroyed_in_the_block_takes_no_values_along(
    gives_up: list[int], tmp_path: Path
) -> None:
    kept, given_up = (
        run_ranks(rank_groups.destroyed_in_the_block, tmp_path / name, 3, gives_up=who)
        for name, who in (("kept", []), ("given-up", gives_up))
    )
    assert given_up == kept


def test_coordinators_of_one_group_are_made_by_one_thread_after_the_other(tmp_path: Path) -> None:
    for met in run_ranks(rank_groups.met_on_threads, tmp_path, 2):
        assert met == [[0, 1]] * 2


@pytest.mark.parametrize("exits", [[0, 1], [0], [1]])
def test_save_in_the_background_comes_through_where_the_block_is_left_by_an_exception(
    exits: list[int], tmp_path: Path
) -> None:
    run_ranks(rank_groups.saved_behind_an_exit, tmp_path, 2, exits=exits)
