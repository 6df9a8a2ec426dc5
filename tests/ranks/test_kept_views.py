"""Views of weights that are gathered from several ranks: refused by name once these change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import rank_views
from tests.support.ranks import run_ranks


@pytest.mark.proof
@pytest.mark.parametrize("host_memory", ["1GiB", "least"])
def test_view_of_a_gathered_weight_is_refused_after_a_step(
    host_memory: int | str, tmp_path: Path
) -> None:
    for told in run_ranks(rank_views.kept_over_a_step, tmp_path, 2, host_memory=host_memory):
        assert told[:2] == ["", ""]
        for index, refusal in enumerate(told[2:]):
            assert refusal.startswith(f"this tensor is a view of layers.{index}.weight"), refusal
