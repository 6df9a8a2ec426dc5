"""What each rank has for itself comes back on that rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import checkpoint
from checkpoint.interop.packing import pack, unpack
from infinity.values.rank_state import own_parts, restore_own
from tests.support import rank_states
from tests.support.ranks import run_ranks


@pytest.mark.proof
def test_buffers_extra_and_random_state_of_every_rank_come_back(tmp_path: Path) -> None:
    every = run_ranks(rank_states.resume, tmp_path, 2)
    for rank, told in enumerate(every):
        assert told["rank"] == rank
        assert told["view"] == list(range(rank, 6))
        assert told["statistics"]
        assert told["again"] == told["losses"]
        assert told["same"] == {"step": 2}
        assert told["other path"] == (
            "RankDifferenceError: rank 0 loads checkpoint, rank 1 same; every rank has to give the "
            "same path"
        )
        assert told["other save"].startswith("RankDifferenceError: rank 1 sees another save at ")
    assert every[0]["mean"] != every[1]["mean"]
    path = tmp_path / "checkpoint"
    assert checkpoint.verify(path).ok
    saved = checkpoint.load(path, only=["model.*"])["model"]
    assert saved["1.running_mean"].tolist() == every[0]["mean"]
    (shard,) = (tmp_path / "exported").glob("*.safetensors")
    assert load_file(shard)["1.running_mean"].tolist() == every[0]["mean"]

    # What is the same on every rank is stored once.
    names = checkpoint.list_tensors(path)
    assert [name for name in names if name.startswith("ranks.")] == ["ranks.1"]
    own = unpack(checkpoint.load(tmp_path / "same", only=["ranks.1"])["ranks"]["1"])
    assert "buffer.1.running_mean" in own
    assert "buffer.same" not in own
    assert "extra" not in own

    # On fewer ranks and on more.
    assert every[0]["alone"] == 0
    assert every[0]["alone mean"] == every[0]["mean"]
    assert every[0]["warned"] == [
        "saved by 2 ranks, loaded on 1: buffers and extra of ranks [1] are not used"
    ]
    three = run_ranks(rank_states.more, tmp_path / "three", 3, path=str(path))
    assert [told["rank"] for told in three] == [0, 1, 0]
    assert [told["mean"] for told in three] == [every[k]["mean"] for k in (0, 1, 0)]
    assert three[0]["warned"] == [
        "saved by 2 ranks, loaded on 3: ranks from 2 on begin with the buffers and extra of rank 0"
    ]


def test_a_buffer_that_one_rank_alone_has_is_restored_there() -> None:
    """Names of buffers may differ between ranks; what this one lacks is left out."""
    mine = nn.Module()
    mine.register_buffer("here", torch.zeros(3))
    parts = {"buffer.here": torch.ones(3), "buffer.gone": torch.ones(2)}
    own = own_parts(lambda only: {"ranks": {"1": pack(parts)}}, 1, {"own_states": [1]})
    found = restore_own(own, mine, torch.device("cpu"))
    assert found == (False, None, {})
    assert torch.equal(mine.get_buffer("here"), torch.ones(3))


def test_buffers_that_grew_on_one_rank_come_back_there_or_are_refused_first(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(rank_states.grown, tmp_path, 2)):
        sizes = [3 + rank, 5 + rank]
        assert told["in the block"] == ["", *sizes]
        assert told["made in a pass"] == ["", *sizes]
        cause = "ValueError: " if rank else "RankFailedError: rank 1 failed: ValueError: "
        assert told["other shape"].startswith(
            f"{cause}seen has shape [6] in the checkpoint, [5] in"
        )
        assert told["then"] == ""


def test_what_a_module_writes_on_one_rank_alone_comes_back_there_alone(tmp_path: Path) -> None:
    every = run_ranks(rank_states.written, tmp_path, 2)
    assert [told["told"] for told in every] == [[0, None, 0], [None, 1, 1]]


@pytest.mark.proof
def test_load_that_fails_on_one_rank_is_refused_on_all_until_one_has_worked(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(rank_states.stopped, tmp_path, 2)):
        cause = "OSError: the disk failed" if rank else "RankFailedError"
        assert told["load"].startswith(cause)
        for door in ("step", "save"):
            assert told[door].startswith("MixedStateError: loading ")
            assert cause in told[door]
