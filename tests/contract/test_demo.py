"""The demo, made small: three processes, one result, nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = [
    *("--steps", "6", "--layers", "2", "--width", "256", "--batch", "2", "--sequence", "32"),
    *("--host-memory", "16MiB", "--device", "cpu"),
]


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--output", "out", *SMALL, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.proof
@pytest.mark.alone
def test_demo_made_small_resumes_reports_and_leaves_only_its_results(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stderr
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    results = {"demo.png", "measurements.json", "report.txt", "sample.txt"}
    assert left == {"out", *(f"out/{name}" for name in results)}
    first, second, plain = json.loads((tmp_path / "out/measurements.json").read_text())["runs"]
    assert len(plain["losses"]) == 4
    assert (len(first["losses"]), second["first_step"], len(second["losses"])) == (3, 3, 3)
    assert max(first["peak_held"], second["peak_held"]) <= 16 << 20
    offloaded_losses = [*first["losses"], *second["losses"]]  # the last of ``plain`` is resumed
    for offloaded, reference in zip(offloaded_losses, plain["losses"], strict=False):
        assert abs(offloaded - reference) < 0.01
    assert (tmp_path / "out/sample.txt").read_text().startswith("import os")
    assert "host memory budget" in done.stdout


@pytest.mark.proof
def test_demo_with_a_budget_that_cannot_work_ends_with_the_least_one(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--host-memory", "100kB")
    assert done.returncode == 1
    assert "least" in done.stderr
    assert list(tmp_path.rglob("*")) == []
