"""Checkpoints of several ranks merged to Hugging Face shards, in less memory than they hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support import cgroup, rank_weights
from tests.support.proof import matrix
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]

INTERPRETER = 256 << 20
"""Python, torch and this library, with room for what they allocate by the way."""
STAGING = 128 << 20
"""Buffers to write from, and blocks of the checkpoint that were read last."""


@pytest.mark.proof
def test_export_of_a_checkpoint_of_ranks_never_holds_the_model(tmp_path: Path) -> None:
    reason = cgroup.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    run_ranks(rank_weights.save_counted, tmp_path, 3)
    path, folder = tmp_path / "checkpoint", tmp_path / "out"
    command = [sys.executable, "-m", "infinity.cli", "export", str(path), str(folder)]
    limit = INTERPRETER + STAGING
    assert limit < rank_weights.COUNT * rank_weights.COUNTED_BYTES
    run = cgroup.run_limited(command, limit, cwd=ROOT)
    assert run.returncode == 0, "killed: it took more" if run.killed else run.stderr
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == [f"w{k}" for k in range(rank_weights.COUNT)]
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            value = shard.get_tensor(name)
        numel = rank_weights.COUNTED_BYTES // 8
        assert torch.equal(value, torch.arange(numel) + int(name[1:]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wanted", "seed"), matrix([(6, 0), *[(25, seed) for seed in range(4)]], usual=[(6, 0)])
)
def test_rank_that_is_interrupted_anywhere_in_an_export_tells_the_others_or_all_have_exported(
    tmp_path: Path, wanted: int, seed: int
) -> None:
    told = run_ranks(rank_weights.interrupted_exports, tmp_path, 2, wanted=wanted, seed=seed)
    for interrupted in (0, 1):
        name = f"rank {interrupted}"
        heard, lines = told[1 - interrupted][name], told[interrupted][name]
        assert len(heard) == len(lines)
        for (complaint,), (line,) in zip(heard, lines, strict=True):
            is_told = complaint.startswith(f"RankFailedError: {name} failed: Interrupted")
            assert is_told or complaint == "", f"{name} at {line}: {complaint}"
        assert any(complaint for (complaint,) in heard), name
