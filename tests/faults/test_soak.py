"""Programs drawn by a seed, offloaded and disturbed, and in memory: see `tools/soak.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from failures.interposed import unavailable_reason
from soaking.judging import Counts, Judge
from soaking.lives import live, undisturbed
from soaking.offloaded import Place
from soaking.programs import MOST_LIVES, life_of, task_of

from swap.update.stages import Stages

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
NUMBER = 2
"""Of a program that is short, and has more state than its least budget."""
_reason = unavailable_reason()


def _judged(folder: Path) -> tuple[list[str], Judge]:
    """What is found of the last, undisturbed life of a program, taken as its first."""
    task, place, counts = task_of(1, NUMBER), Place.make(folder, 1), Counts()
    said: list[list[Any]] = []

    def tell(*what: Any) -> None:
        said.append([*what])

    undisturbed(task, place, tell)
    judge = Judge(task, said.pop()[1], counts)
    live(task, life_of(task, MOST_LIVES), place, tell)
    faults = judge.faults(said)
    assert counts.comparisons > len(task.steps) > 0
    return faults, judge


@pytest.mark.filterwarnings("ignore")
def test_program_that_nothing_disturbs_has_the_bits_of_memory(tmp_path: Path) -> None:
    faults, judge = _judged(tmp_path)
    assert faults == []
    assert judge.is_complete


@pytest.mark.filterwarnings("ignore")
def test_update_of_one_subgroup_that_is_skipped_once_is_found(tmp_path: Path) -> None:
    apply, calls = Stages._apply, iter(range(1 << 30))

    def skip_one(self: Stages, *arguments: Any) -> None:
        if next(calls) != 12:
            apply(self, *arguments)

    with patch.object(Stages, "_apply", skip_one):
        faults, _ = _judged(tmp_path)
    assert "values at the end are others" in faults


def test_programs_are_the_same_for_the_same_seed() -> None:
    assert task_of(3, 4) == task_of(3, 4) != task_of(3, 5)
    task = task_of(3, 4)
    assert life_of(task, 0) == life_of(task, 0) != life_of(task, 1)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.skipif(_reason is not None, reason=str(_reason))
def test_a_minute_of_random_programs_has_the_bits_of_memory() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        command = [sys.executable, "tools/soak.py", "--seed", "16", "--minutes", "1"]
        options = ["--folder", folder]
        done = subprocess.run(
            [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert "0 bad" in done.stdout
