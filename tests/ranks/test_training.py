"""Training over several ranks, against one process that accumulates the batches of all.

Two gradients are added with one rounding, in whatever order, and the mean of two is exact; so two
ranks have the bits of one process that accumulates two batches. So have four in float32, which add
up in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import rank_jobs
from tests.support.proof import matrix
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = [[0], [1]]
RUNS: dict[str, dict[str, Any]] = {
    "everything-in-host": {"batches": TWO, "steps": 3},
    "clipped-bfloat16-on-nvme": {
        "batches": TWO,
        "steps": 3,
        "dtype": "bfloat16",
        "host_memory": "least",
        "max_grad_norm": 30.0,
    },
    "recomputed-without-overlap-on-nvme": {
        "batches": TWO,
        "steps": 3,
        "host_memory": "least",
        "recompute": "non-reentrant",
        "overlap": False,
    },
    "moments-in-8-bits": {"batches": TWO, "steps": 3, "dtype": "bfloat16", "state": "uint8"},
    "scaled-float16": {"batches": TWO, "steps": 3, "dtype": "float16", "max_grad_norm": 1.0},
    "compiled-blocks-on-nvme": {
        "batches": TWO,
        "steps": 3,
        "dtype": "bfloat16",
        "host_memory": "least",
        "compiled": True,
    },
    "tiled-with-activations-on-nvme": {
        "batches": TWO,
        "steps": 2,
        "host_memory": "least",
        "activations": "nvme",
        "max_parameter_bytes": 256 * 1024,
    },
}
"""What two ranks do. They read from NVMe where the budget is the least."""
USUAL = ["clipped-bfloat16-on-nvme", "tiled-with-activations-on-nvme"]
OTHERS = [name for name in RUNS if name not in USUAL]


def assert_same(folder: Path, alone: Path, name: str, world_size: int) -> None:
    """Every rank has the bits of the process that was alone."""
    expected = torch.load(alone / f"{name}-0", weights_only=True)
    for rank in range(world_size):
        values = torch.load(folder / f"{name}-{rank}", weights_only=True)
        assert expected.keys() == values.keys()
        for key, value in expected.items():
            assert torch.equal(value, values[key]), f"{name}: {key} on rank {rank}"


def train_alone(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What one process does with the batches of all ranks."""
    folder.mkdir(exist_ok=True)
    batches = [[batch for rank in run["batches"] for batch in rank]]
    return rank_jobs.train_gpt(0, folder, **run | {"batches": batches, "host_memory": "1GiB"})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("names", matrix([USUAL, OTHERS], usual=[USUAL]), ids=["usual", "others"])
def test_two_ranks_in_every_mode_have_the_bits_of_one_that_accumulates(
    names: Sequence[str], tmp_path: Path
) -> None:
    runs = [RUNS[name] | {"name": name} for name in names]
    every = run_ranks(rank_jobs.train_each, tmp_path / "two", 2, runs=runs)
    for number, run in enumerate(runs):
        alone = train_alone(tmp_path / "one", run)
        first, second = (rank[number] for rank in every)
        assert first["norms"] == second["norms"] == alone["norms"], run["name"]
        pairs = zip(first["losses"], second["losses"], strict=True)
        both = [loss for pair in pairs for loss in pair]
        assert both == alone["losses"], run["name"]
        # Half of a gradient is not exact where float16 has no bits left for it.
        reference = "two" if run.get("dtype") == "float16" else "one"
        assert_same(tmp_path / "two", tmp_path / reference, run["name"], 2)
        if run.get("host_memory") == "least":
            assert first["read_bytes"] > 0, run["name"]
            assert first["peak_host_bytes"] <= first["host_memory"], run["name"]
    assert list((tmp_path / "two" / ".infinity").glob("*")) == []


@pytest.mark.proof
def test_four_ranks_have_the_bits_of_one_that_accumulates(tmp_path: Path) -> None:
    run = {"name": "four", "batches": [[0], [1], [2], [3]], "steps": 2, "max_grad_norm": 10.0}
    every = run_ranks(rank_jobs.train_each, tmp_path / "four", 4, runs=[run])
    alone = train_alone(tmp_path / "one", run)
    assert all(rank[0]["norms"] == alone["norms"] for rank in every)
    assert_same(tmp_path / "four", tmp_path / "one", "four", 4)
    state = [rank[0]["state_bytes"] for rank in every]
    assert max(state) <= 1.02 * min(state)
