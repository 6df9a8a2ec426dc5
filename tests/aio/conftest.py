"""Engines over every backend, and a gate that keeps operations in flight for as long as needed."""

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from aio import AioError, Backend, Engine, MemoryBackend, opening
from aio.backends import NAMES

ROOT = Path(__file__).parents[2]
# Python 3.12 warns of forks in a process with threads, which is what is tested.
_QUIET = ("-W", "ignore::DeprecationWarning")
Bytes = npt.NDArray[np.uint8]

FAULTY = MemoryBackend(seed=7, short_transfer=0.3, again=0.02, interrupted=0.1, short_submit=0.2)
BACKENDS: dict[str, Backend | MemoryBackend] = {
    **{name: cast(Backend, name) for name in NAMES},
    "faulty": FAULTY,
}


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that a process has once come in each test anew."""
    monkeypatch.setattr(opening, "_buffered", set())
    monkeypatch.setattr(opening, "_unreserved", set())


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def open_descriptors() -> set[int]:
    """Of this process; without the one that the question itself takes."""
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Inside, this process may open `count` more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 10, hard))
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_python(script: str, *arguments: str, under: Sequence[str] = (), **env: str) -> list[str]:
    """Runs an indented script in a process of its own and returns the lines it printed.

    `under` is a command that runs the process, `env` what is added to its environment.
    """
    run = subprocess.run(
        [*under, sys.executable, *_QUIET, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | env,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def skip_unless_available(backend: Backend | MemoryBackend) -> None:
    try:
        Engine(backend, queue_depth=1).close()
    except AioError as error:
        pytest.skip(str(error))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend | MemoryBackend:
    """Every backend that this machine has, and one with faults that must not be noticed."""
    chosen = BACKENDS[request.param]
    skip_unless_available(chosen)
    return chosen


@pytest.fixture(params=["posix", "libaio", "io_uring"])
def real_backend(request: pytest.FixtureRequest) -> str:
    """Every backend that works on real descriptors in the kernel's own time."""
    skip_unless_available(request.param)
    return str(request.param)


@pytest.fixture
def engine(backend: Backend | MemoryBackend) -> Iterator[Engine]:
    """Small blocks and a small depth, so that small files take many of both."""
    with Engine(backend, queue_depth=8, block_bytes=1 << 16, lanes=2) as made:
        yield made


@pytest.fixture
def plain() -> Iterator[Engine]:
    with Engine("posix") as engine:
        yield engine


class Gate:
    """While it is shut, nothing completes in an engine made with `backend()`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def backend(self, **faults: float) -> MemoryBackend:
        return MemoryBackend(gate=self._fd, **faults)  # type: ignore[arg-type]

    def open(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class Replaced:
    """An object with some attributes replaced."""

    def __init__(self, original: object, **replaced: object) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


@pytest.fixture
def gated(gate: Gate) -> Iterator[Engine]:
    """An engine whose operations stay in flight until the gate is opened, at the latest here."""
    with Engine(gate.backend(), queue_depth=4, block_bytes=1 << 16) as made:
        yield made
        gate.open()


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of given bytes, or of so many random ones, and returns its path."""

    def make(content: Bytes | int = 0, name: str = "data.bin") -> Path:
        path = tmp_path / name
        path.write_bytes((random_bytes(content) if isinstance(content, int) else content).data)
        return path

    return make
