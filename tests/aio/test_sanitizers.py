"""The C engine under the address, undefined-behaviour and thread sanitizers, without Python."""

from pathlib import Path

import pytest

from aio.backends import NAMES
from tests.support.sanitizers import SANITIZERS, harness_of, run_harness, under_valgrind

NOT_HERE = 77  # what the harness exits with when the kernel has no such backend
VALGRIND = "valgrind"


@pytest.fixture(
    scope="module", params=[*SANITIZERS, pytest.param(VALGRIND, marks=pytest.mark.proof)]
)
def command(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[str | Path]:
    """The harness and the engine in one program, with what looks on."""
    folder = tmp_path_factory.mktemp("harness")
    if request.param == VALGRIND:
        return [*under_valgrind(), harness_of("aio", folder)]
    return [harness_of("aio", folder, sanitizer=request.param)]


@pytest.mark.parametrize("backend", NAMES)
def test_engine_under_load_has_no_fault_leak_or_race(
    command: list[str | Path], backend: str, tmp_path: Path
) -> None:
    run = run_harness([*command, tmp_path / "data", backend])
    if run.returncode == NOT_HERE:
        pytest.skip(f"this kernel has no {backend}")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
