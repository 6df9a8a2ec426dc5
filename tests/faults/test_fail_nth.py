"""Each operation of what the library does fails once, see `tools/fail_nth.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from failures.interposed import KINDS, environment, unavailable_reason

from tests.support.proof import matrix

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
_reason = unavailable_reason()
_ACTIONS = {
    "save:striped,save:manager": 2,
    "load:striped,load:stream": 1,
    "save:save,save:async,save:export,save:stream,save:folder": 5,
    "enter:keep-least,exit:keep-least,modify:keep-least": 67,
    "forward:nvme-least,backward:nvme-least,spill:nvme-least": 97,
    "step:keep-least,flush:keep-least,load:keep-least,save:keep-least": 67,
    "snapshot:take,snapshot:replace,snapshot:drop,snapshot:restore,snapshot:list": 37,
    "snapshot:behind,snapshot:replace behind": 37,
}
"""What is attacked, and how many calls lie between two points."""
_USUAL = {("load:striped,load:stream", "EIO,zero,short,dead")}
_KINDS = ("EIO,zero,short,dead", "ENOSPC,EINTR,EAGAIN,ENOMEM,EMFILE,torn,full")


@pytest.mark.skipif(_reason is not None, reason=str(_reason))
@pytest.mark.parametrize(
    ("actions", "kinds"), matrix([(a, k) for a in _ACTIONS for k in _KINDS], usual=_USUAL)
)
def test_operation_that_fails_is_named_and_costs_nothing_else(
    actions: str, kinds: str, counted: Callable[..., None]
) -> None:
    """Takes the time of a program that imports torch."""
    command = [sys.executable, str(ROOT / "tools" / "fail_nth.py"), "--actions", actions]
    options = ["--kinds", kinds, "--every", str(_ACTIONS[actions])]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        done = subprocess.run(
            [*command, *options, "--folder", folder],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "operations failed in" in done.stdout
    counted("failed operations", operations=int(done.stdout.splitlines()[-1].split()[0]))
    assert not done.stdout.startswith("0 operations")


def test_kinds_are_all_tried() -> None:
    assert {kind for kinds in _KINDS for kind in kinds.split(",")} == set(KINDS)
