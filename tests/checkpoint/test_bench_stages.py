"""The benchmark of what saves and loads take of processors."""

from __future__ import annotations

import json
from pathlib import Path

import bench_stages
import pytest

import checkpoint


@pytest.mark.proof
def test_every_stage_has_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stages.json"
    small = ["--size", "32MiB", "--tensors", "300", "--requests", "100", "--rounds", "1"]
    bench_stages.main(["--dir", str(tmp_path), "--json", str(out), *small])
    rows = json.loads(out.read_text())["rows"]
    assert {unit for _, unit in rows.values()} == {"GB/s a core", "us a tensor"}
    assert all(number > 0 for number, _ in rows.values())
    assert all(name in capsys.readouterr().out for name in list(rows)[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]


def test_what_is_saved_without_transfers_is_found_out_by_a_load(tmp_path: Path) -> None:
    state = {"w": bench_stages.one_tensor(32 << 20, 0).fill_(1.0)}
    with bench_stages.IdleEngine() as idle:
        checkpoint.save(state, tmp_path / "step", engine=idle)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"bytes at offset"):
        checkpoint.load(tmp_path / "step")
