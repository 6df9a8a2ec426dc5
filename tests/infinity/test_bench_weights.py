"""The benchmark of weights on their way in and out, in small: what it runs, writes down, prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_weights import PHASES, check_same_bytes, main, with_limits

import checkpoint

SIZE = ["--width=128", "--depth=2", "--vocabulary=256", "--budget=32MiB", "--shard-bytes=300000"]


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["none", "adamw"])
def test_weights_go_in_and_out_beside_what_the_disks_can_do(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    files, result = tmp_path / "files", tmp_path / "result.json"
    files.mkdir()
    places = [f"--dir={files}", f"--dir={nvme}", f"--json={result}"]
    main([*places, *SIZE, "--rounds=2", f"--optimizer={optimizer}"])
    found: dict[str, Any] = json.loads(result.read_text())
    assert len(found["rounds"]) == 2
    for entry in found["rounds"]:
        assert {*PHASES} < entry.keys()
        for phase in PHASES:
            assert entry[phase]["seconds"] > 0
        assert entry["rates"].keys() == {
            f"{place} {way}" for place in ("files", "nvme") for way in ("read", "write")
        }
    printed = capsys.readouterr().out
    assert all(phase in printed for phase in PHASES)
    assert not list(nvme.iterdir())
    assert not list(files.iterdir())


def test_a_limit_is_the_slower_of_reading_here_and_writing_there() -> None:
    rates = {"files read": 2.0, "files write": 1.0, "nvme read": 4.0, "nvme write": 0.5}
    moved = {"read_bytes": 8, "written_bytes": 3}
    found = with_limits({phase: dict(moved) for phase in PHASES}, rates)
    limits = {phase: one["limit_seconds"] for phase, one in found.items()}
    assert limits == {"in": 6.0, "out": 3.0, "leave": 3.0}


def test_a_tensor_that_comes_out_otherwise_is_named(tmp_path: Path) -> None:
    values = {"first": torch.ones(64).bfloat16(), "second": torch.ones(64).bfloat16()}
    checkpoint.write_safetensors(values, tmp_path / "in")
    checkpoint.write_safetensors(values, tmp_path / "out", max_shard_bytes=200)
    check_same_bytes(tmp_path / "in", tmp_path / "out")
    values["second"][7] = 2.0
    checkpoint.write_safetensors(values, tmp_path / "out")
    with pytest.raises(RuntimeError, match="second came out otherwise"):
        check_same_bytes(tmp_path / "in", tmp_path / "out")
