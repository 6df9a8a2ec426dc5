"""The C engine under the address, undefined-behaviour and thread sanitizers, without Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aio.backends import NAMES

ROOT = Path(__file__).parents[2]
NOT_HERE = 77  # what the harness exits with when the kernel has no such backend


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness and the engine in one program, compiled with a sanitizer."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("harness") / "harness"
    sources = [*sorted((ROOT / "aio" / "csrc").glob("*.c")), ROOT / "tests" / "aio" / "harness.c"]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", f"-fsanitize={request.param}"]
    flags += ["-fno-sanitize-recover=all", "-I", str(ROOT / "aio" / "csrc"), "-pthread"]
    built = subprocess.run(
        [compiler, *flags, "-o", str(program), *map(str, sources), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"needs the run-time library of -fsanitize={request.param}")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("backend", NAMES)
def test_engine_under_load_has_no_fault_leak_or_race(
    harness: Path, backend: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [harness, tmp_path / "data", backend],
        capture_output=True,
        text=True,
        check=False,
        # The tests themselves may run with a sanitizer's library loaded before all others.
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )
    if run.returncode == NOT_HERE:
        pytest.skip(f"this kernel has no {backend}")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
