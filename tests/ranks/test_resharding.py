"""Checkpoints of several ranks, loaded on other numbers of them: training goes on with the same
bits, where sums over ranks are exact.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from tests.support import rank_jobs, rank_worlds
from tests.support.ranks import run_ranks

COUNTS = (1, 2, 3, 4)


def bytes_by_rank(path: Path) -> dict[str, int]:
    """Bytes of the data files of each rank of a checkpoint."""
    sizes: dict[str, int] = defaultdict(int)
    for file in json.loads((path / "manifest.json").read_text())["files"]:
        name = file["path"].rpartition("/")[2]
        sizes[name.partition("-")[0]] += (path / file["path"]).stat().st_size
    return dict(sizes)


@pytest.mark.proof
def test_checkpoints_of_one_to_four_ranks_go_on_with_the_same_bits_on_one_to_four(
    tmp_path: Path,
) -> None:
    every = run_ranks(rank_jobs.reshard, tmp_path, len(COUNTS))
    for name in ("first", "then"):
        norms = [value for rank in every for key, value in rank.items() if key.startswith(name)]
        assert all(other == norms[0] for other in norms), name
    reference = torch.load(tmp_path / "values-1-1-0", weights_only=True)
    for before, after in itertools.product(COUNTS, COUNTS):
        for rank in range(after):
            values = torch.load(tmp_path / f"values-{before}-{after}-{rank}", weights_only=True)
            for name, value in reference.items():
                assert torch.equal(value, values[name]), f"{name}: {before} to {after} ranks"
    first = checkpoint.load(tmp_path / "from-1", only=["model.*", "optimizer.*"])
    for count in COUNTS[1:]:
        path = tmp_path / f"from-{count}"
        assert checkpoint.verify(path).ok
        loaded = checkpoint.load(path, only=["model.*", "optimizer.*"])
        for name, value in first["model"].items():
            assert torch.equal(value, loaded["model"][name])
        (shard,) = (tmp_path / f"exported-{count}").glob("*.safetensors")
        exported = load_file(shard)
        assert exported.keys() == first["model"].keys()
        assert all(torch.equal(value, exported[name]) for name, value in first["model"].items())
        sizes = bytes_by_rank(path)
        assert len(sizes) == count
        assert max(sizes.values()) <= 1.25 * min(sizes.values())


@pytest.mark.proof
def test_what_ranks_saved_goes_into_fsdp2_and_tensor_parallelism_and_back(tmp_path: Path) -> None:
    run_ranks(rank_worlds.parallel_worlds, tmp_path, 2)
