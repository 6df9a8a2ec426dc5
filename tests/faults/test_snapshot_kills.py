"""A run that is killed at any moment loses no step whose snapshot was taken."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kill_snapshots
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", [[], ["--keep", "2"], ["--behind"], ["--behind", "--keep", "2"]])
def test_killed_run_is_restored_in_a_new_process_with_all_its_bits(
    more: list[str], tmp_path: Path, counted: Callable[..., None]
) -> None:
    command = [
        sys.executable,
        "tools/kill_snapshots.py",
        "--rounds",
        "6",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout
    counted("killed training", kills=6)


@pytest.mark.parametrize("last", ["", "t", "taken", "taken ", "taken 1"])
def test_line_that_a_kill_has_cut_says_nothing(last: str) -> None:
    script = f"""
import os, signal
os.write(1, b"begun\\nrestored 3 abc\\ntaken 7\\n")
os.write(1, {last.encode()!r})
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    told = kill_snapshots.one_round([sys.executable, "-c", script], 60.0)
    assert told == kill_snapshots.Told(restored=3, taken=7, wrong="")
