"""The example under torchrun: a rank is killed, torchrun starts all again, training goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.alone
def test_a_rank_that_is_killed_is_started_again_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run = tmp_path / "run"
    arguments = {"steps": "20", "save-every": "2", "width": "64", "layers": "1"}
    arguments |= {"nvme": str(tmp_path / "nvme"), "checkpoints": str(run)}
    arguments |= {"host-memory": "256MiB", "keep": "2"}
    options = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    command += ["--nproc-per-node=2", str(ROOT / "examples" / "torchrun.py"), *options]
    with (tmp_path / "output").open("w") as output:
        torchrun = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while not any(run.glob("step-*/manifest.json")) and torchrun.poll() is None:
            time.sleep(0.02)
        ranks = [
            child
            for child in psutil.Process(torchrun.pid).children(recursive=True)
            if any("torchrun.py" in word for word in child.cmdline())
        ]
        assert ranks, "there is no rank to kill"
        ranks[-1].kill()
        code = torchrun.wait(timeout=120)
    finally:
        torchrun.kill()
    told = (tmp_path / "output").read_text()
    assert code == 0, told
    assert "goes on from step " in told
    assert "step 20: loss" in told
    assert sorted(step.name for step in run.iterdir()) == ["step-18", "step-20"]
    assert (run / "step-20" / "manifest.json").exists()
