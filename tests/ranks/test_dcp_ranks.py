"""What several ranks save through torch.distributed.checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import rank_dcp
from tests.support.ranks import run_ranks


def test_a_rank_that_dcp_gives_nothing_to_write_leaves_no_file(tmp_path: Path) -> None:
    for files in run_ranks(rank_dcp.save_replicated, tmp_path, 2):
        manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
        assert files == [file["path"].rpartition("/")[2] for file in manifest["files"]]
        assert len(files) == 1


@pytest.mark.parametrize("keeps_plans", [False, True])
def test_what_another_rank_knows_of_damage_counts_for_steps_that_dcp_saves(
    tmp_path: Path, keeps_plans: bool
) -> None:
    for kept in run_ranks(rank_dcp.save_after_damage, tmp_path, 2, keeps_plans=keeps_plans):
        assert kept == [[1], [1, 2], [1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5]]
