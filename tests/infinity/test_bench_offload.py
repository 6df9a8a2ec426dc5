"""The benchmark of a step, in small: what it runs, writes down and prints."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_offload import Turns, main
from bounds.validation import comparisons
from offload_systems import Job

SIZE = ["--width=64", "--depth=2", "--vocabulary=128", "--batch=1", "--tokens=32"]
ROUNDS = ["--together", "--rounds=2", "--steps=2", "--device=cpu", "--budgets=32MiB"]


@pytest.mark.proof
@pytest.mark.alone
def test_systems_train_the_same_in_blocks_that_take_turns(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    main([f"--nvme={nvme}", f"--json={result}", *SIZE, *ROUNDS])
    rounds: list[dict[str, Any]] = json.loads(result.read_text())["rounds"]
    assert len(rounds) == 2
    (found,) = comparisons("once", json.loads(result.read_text()))
    assert 0 < found.step.least_seconds <= found.step.most_seconds
    for entry in rounds:
        assert entry["samples"].keys() == {"plain", "ours:32MiB"}
        for sample in entry["samples"].values():
            assert len(sample["step_seconds"]) == len(sample["losses"]) == 2
            assert sample["peak_bytes"] > 0
    losses = [[sample["losses"] for sample in entry["samples"].values()] for entry in rounds]
    for plain, ours in losses:
        assert ours == pytest.approx(plain, rel=0.01)
    assert losses[0] != losses[1]  # the processes go on from where they were
    assert "ours:32MiB" in capsys.readouterr().out
    assert not list(nvme.iterdir())


@pytest.mark.proof
def test_a_system_that_fails_is_named(nvme: Path) -> None:
    job = Job(
        system="ours:1MiB",
        nvme=[str(nvme)],
        width=64,
        depth=1,
        vocabulary=128,
        batch=1,
        tokens=32,
        steps=1,
        dtype="bfloat16",
        device="cpu",
        clip=None,
        init="meta",
    )
    with (
        pytest.raises(RuntimeError, match="ours:1MiB ended with status 1"),
        Turns(job) as turns,
    ):
        turns.block()
