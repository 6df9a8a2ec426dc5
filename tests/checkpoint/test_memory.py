"""Saves and loads take their staging memory and no more, held by the kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import cgroup
from tests.support.proof import matrix

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
STATE = 512 * MIB
STAGING = 32 * MIB
INTERPRETER = 200 * MIB
"""Python, torch and this library, with room for what they allocate by the way."""

WORK = """
import sys, torch, checkpoint
path, state, staging, *stripes = sys.argv[1:]
count = int(state) // 4
tensors = {"big": torch.full((count // 2,), 1.0),
           "turned": torch.full((1024, count // 4096), 2.0).t(),
           "half": None, "upright": None,
           "small": [torch.full((count // 4000,), 3.0) for _ in range(1000)]}
tensors["half"] = tensors["big"][: count // 4]
tensors["upright"] = tensors["turned"].t()
options = {"staging_bytes": int(staging)}
checkpoint.save(tensors, path, stripes or None, **options)
checkpoint.save_async(tensors, path, stripes or None, **options).result()
tensors["big"].zero_()
assert checkpoint.load(path, into=tensors, **options)["big"].min() == 1
for name in ("half", "upright"):
    tensors[name].zero_()
    assert checkpoint.load(path, into={name: tensors[name]}, **options)[name].min() > 0
assert checkpoint.verify(path, **options).ok
"""


@pytest.fixture(autouse=True)
def _limits() -> None:
    reason = cgroup.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("num_stripes", matrix([0, 2], usual=[2]))
def test_saves_and_loads_stay_within_the_staging_budget(tmp_path: Path, num_stripes: int) -> None:
    stripes = [tmp_path / f"ssd{k}" for k in range(num_stripes)]
    for stripe in stripes:
        stripe.mkdir()
    arguments = [str(tmp_path / "step"), str(STATE), str(STAGING), *map(str, stripes)]
    command = [sys.executable, "-c", WORK, *arguments]
    run = cgroup.run_limited(command, STATE + STAGING + INTERPRETER, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, ""), "killed: it took more" if run.killed else ""
