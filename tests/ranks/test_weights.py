"""Checkpoints of several ranks as first weights of a model: every rank reads what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoint
from tests.support import rank_weights
from tests.support.ranks import run_ranks


@pytest.mark.proof
def test_ranks_begin_with_the_masters_of_a_run_in_16_bits(tmp_path: Path) -> None:
    assert run_ranks(rank_weights.masters_of_a_checkpoint, tmp_path, 2) == [True, True]


@pytest.mark.proof
def test_ranks_begin_with_a_checkpoint_of_ranks_and_read_what_they_keep(tmp_path: Path) -> None:
    every = run_ranks(rank_weights.weights_of_a_checkpoint, tmp_path, 3)
    whole = sum(
        value.nbytes for value in checkpoint.load(tmp_path / "checkpoint")["model"].values()
    )
    assert every[0]["1"] == whole
    for rank in range(3):
        # A slice each of the large ones, and all of the small ones.
        assert every[rank]["3"] < 0.4 * whole
