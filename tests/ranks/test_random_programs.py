"""Programs over ranks that a seed draws, see ``tests.support.rank_programs``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_programs import run_program
from tests.support.ranks import run_ranks


def _check(folder: Path, world_size: int, seed: int) -> None:
    for rank, found in enumerate(
        run_ranks(run_program, folder, world_size, seed=seed, num_blocks=5)
    ):
        assert found["wrong"] == [], f"rank {rank}, seed {seed}"
        assert found["compared"] > 5


def test_what_ranks_see_has_the_same_bits_however_they_came_there(tmp_path: Path) -> None:
    _check(tmp_path, 2, 3)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4, 16))
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_ranks_see_has_the_same_bits_however_they_came_there_in_many_programs(
    tmp_path: Path, world_size: int, seed: int
) -> None:
    _check(tmp_path, world_size, seed)
