"""The programs that measure ranks, run small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    """What a program printed. Fails with it if the program did."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
@pytest.mark.alone
def test_bench_ranks_saves_and_loads_evenly_and_leaves_nothing(tmp_path: Path) -> None:
    ssds = [tmp_path / "a", tmp_path / "b"]
    for ssd in ssds:
        ssd.mkdir()
    result = tmp_path / "result.json"
    options = ["--ranks", "1,2", "--size", "64MiB", "--rounds", "1", "--limit", "1GiB"]
    directories = [word for ssd in ssds for word in ("--dir", str(ssd))]
    run("tools/bench_ranks.py", *directories, *options, "--json", str(result))
    one, two = json.loads(result.read_text())["summary"]
    assert two["bytes"] > 1.99 * one["bytes"]
    assert two["largest over mean"] < 1.001
    assert two["load, x N x limit"][0] > 0
    assert [list(ssd.iterdir()) for ssd in ssds] == [[], []]


@pytest.mark.proof
@pytest.mark.alone
def test_kill_ranks_kills_one_and_finds_the_same_bits_in_the_end(tmp_path: Path) -> None:
    options = ["--times", "1", "--starting", "0", "--window", "0.5", "--timeout", "30"]
    told = run("tools/kill_ranks.py", "--dir", str(tmp_path), *options)
    assert "has the bits of undisturbed training; nothing was left behind" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
@pytest.mark.alone
def test_two_ranks_of_the_demo_have_the_bits_of_one(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    options = ["--nvme", str(tmp_path / "nvme"), "--width", "192", "--layers", "1", "--steps", "2"]
    options += ["--batches", "2", "--sequence", "32", "--host-memory", "256MiB"]
    two, one = (str(tmp_path / name) for name in ("two", "one"))
    for ranks, output, more in (("2", two, []), ("1", one, ["--compare", two])):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, "examples/train_gpt_ranks.py", "--output", output, *more, *options]
        told = run(*command)
    assert "losses: the same bits" in told
    assert "norms: the same bits" in told
    assert "state in the end: 52 of 52 tensors have the same bits" in told
    written = [
        rank["checkpoint bytes"]
        for rank in json.loads(Path(two, "result.json").read_text())["ranks"]
    ]
    assert max(written) < 1.02 * min(written)
