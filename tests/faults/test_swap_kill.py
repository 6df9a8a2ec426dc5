"""A process killed in the middle of a step leaves nothing that the next does not reclaim."""

import signal
from pathlib import Path

import pytest

from swap.plan.layout import pack
from swap.tiered import TieredState
from tests.support.proof import matrix
from tests.support.scripts import Script
from tests.support.tiers import RULE, Plain, assert_same, fill_both, placement_of, specs_of

ROOT = Path(__file__).parents[2]
SIZES = (200_000, 70_000, 30, 90_000)

TRAIN = """
import os
import signal
import sys
from unittest.mock import patch

from tests.faults.test_swap_kill import make_state
from tests.support.tiers import RULE, fill_both

*folders, kernels = sys.argv[1:]
left = int(kernels)
apply = RULE.apply


def apply_and_die(*args):
    global left
    left -= 1
    apply(*args)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)


state, plain = make_state(folders)
fill_both(state, plain)
with patch.object(RULE, "apply", apply_and_die):
    while True:
        for parameter in range(len(plain.specs)):
            state.weights.acquire([parameter], "test")
            state.weights.release("test")
            state.add_gradient(parameter, plain.weight(parameter))
        state.step(plain.updates(range(len(plain.specs))), 1.0)
"""


def make_state(folders: list[str]) -> tuple[TieredState, Plain]:
    specs = specs_of(SIZES)
    placement = placement_of(pack(specs, 1 << 16), arena_bytes=1 << 21)
    return TieredState(placement, RULE, folders), Plain(specs)


@pytest.mark.parametrize("kernels", matrix([0, 1, 7, 23], usual=[0, 7]))
def test_killed_step_is_reclaimed_by_the_next_process(tmp_path: Path, kernels: int) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    killed = Script(TRAIN, *folders, kernels)
    _, errors = killed.end()
    assert killed.returncode == -signal.SIGKILL, errors
    left = sorted(tmp_path.glob("*/.infinity/*"))
    assert len(left) == 2
    assert all((folder / "state.swap").stat().st_blocks for folder in left)
    state, plain = make_state(folders)
    assert not any(folder.exists() for folder in left)
    assert len(list(tmp_path.glob("*/.infinity/*"))) == 2
    fill_both(state, plain)
    assert_same(state, plain)
    state.close()
    assert list(tmp_path.glob("*/*")) == []
