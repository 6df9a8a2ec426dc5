"""The C code of kernels and arenas under sanitizers and valgrind, without Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sanitizers import SANITIZERS, harness_of, run_harness, under_valgrind

_ROUNDS = {"swap": ("12", "6"), "checkpoint": ("30",)}
"""What the harness of each package is told: how often, and of kernels also how many forks."""
_FEWER = {"swap": ("2", "0"), "checkpoint": ("6",)}
"""Under valgrind, to which a child leaks what threads of its parent held."""

pytestmark = [pytest.mark.proof, pytest.mark.parametrize("package", sorted(_ROUNDS))]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_native_code_in_many_threads_has_no_fault_or_race(
    package: str, sanitizer: str, tmp_path: Path
) -> None:
    program = harness_of(package, tmp_path, sanitizer=sanitizer)
    run = run_harness([program, *_ROUNDS[package]], TSAN_OPTIONS="die_after_fork=0")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_native_code_under_valgrind_uses_no_memory_that_is_not_its_own(
    package: str, tmp_path: Path
) -> None:
    program = harness_of(package, tmp_path)
    run = run_harness([*under_valgrind(), program, *_FEWER[package]])
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
