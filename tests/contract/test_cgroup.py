"""The memory limit that other tests rely on is itself real."""

import sys
from pathlib import Path

import pytest

from tests.support import cgroup

MIB = 1 << 20
_reason = cgroup.unavailable_reason()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def _touch(num_mib: int) -> list[str]:
    """A command that fills `num_mib` MiB of memory and says so."""
    return [sys.executable, "-c", f"x = b'x' * ({num_mib} << 20); print(len(x))"]


def test_run_limited_below_the_limit_reports_output_and_peak() -> None:
    run = cgroup.run_limited(_touch(100), 400 * MIB)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{100 * MIB}\n"
    assert 100 * MIB <= run.peak_bytes <= 400 * MIB


def test_run_limited_above_the_limit_is_killed_within_it() -> None:
    run = cgroup.run_limited(_touch(300), 100 * MIB)
    assert run.killed
    assert run.peak_bytes <= 100 * MIB
    assert run.stdout == ""


def test_run_limited_failing_command_returns_its_code_and_stderr() -> None:
    run = cgroup.run_limited(["sh", "-c", "echo broken >&2; exit 7"], 100 * MIB)
    assert (run.returncode, run.stderr) == (7, "broken\n")
    assert not run.killed


def test_run_limited_leaves_no_cgroup_behind(tmp_path: Path) -> None:
    orphan = "sleep 600 & echo $!; cat /proc/self/cgroup"
    run = cgroup.run_limited(["sh", "-c", f"({orphan}) > out 2>&1"], 100 * MIB, cwd=tmp_path)
    pid, *groups = (tmp_path / "out").read_text().splitlines()
    names = {Path(line.split(":", 2)[2]).name for line in groups}
    (name,) = {name for name in names if name.startswith("infinity-test-")}
    assert run.returncode == 0
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{name}"))
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
