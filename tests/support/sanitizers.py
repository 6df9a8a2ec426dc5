"""C sources of a package with a program that drives them without Python, under tools that look on.

Sanitizers are compiled in; valgrind runs what was compiled without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = ("address,undefined", "thread")
_VALGRIND = ("--quiet", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite")
_FLAGS = {"swap": ("-std=gnu11",)}
"""Of packages that are not built like the others."""
_USUAL = ("-std=c11", "-D_GNU_SOURCE")


def harness_of(package: str, folder: Path, *, sanitizer: str = "") -> Path:
    """``tests/<package>/harness.c`` and the sources of the package in one program in ``folder``.

    Skips the test where there is no compiler, or no run-time library of the sanitizer.
    """
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    program, csrc = folder / f"harness-{package}", ROOT / package / "csrc"
    sources = [*sorted(csrc.glob("*.c")), ROOT / "tests" / package / "harness.c"]
    flags = [*_FLAGS.get(package, _USUAL), "-O1", "-g", "-ffp-contract=off", "-pthread"]
    if sanitizer:
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = [compiler, *flags, "-I", str(csrc), "-o", str(program), *map(str, sources)]
    built = subprocess.run([*command, "-lm", "-ldl"], capture_output=True, text=True, check=False)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"needs the run-time library of -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    return program


def run_harness(command: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[str]:
    """Without a sanitizer's library that tests themselves may have loaded before all others."""
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=own | env)


def under_valgrind() -> list[str]:
    """The beginning of a command; skips the test where there is no valgrind.

    Leaks are what nothing leads to any more: threads of a pool are alive at the end.
    """
    found = shutil.which("valgrind")
    if found is None:
        pytest.skip("needs valgrind")
    return [found, *_VALGRIND, "--errors-for-leak-kinds=definite"]
