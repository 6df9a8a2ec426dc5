"""Ctrl-C at any line: nothing leaks, nothing hangs, and the next one works."""

from pathlib import Path

import pytest

from aio import Engine, sync_directory
from tests.support.interrupts import Remains, interrupt, sampled

NUM_SAMPLES = 12


def io(folder: Path) -> None:
    """An engine's life: open, write, sync, read, close."""
    content = bytes(range(256)) * 48
    with (
        Engine("posix", queue_depth=2, block_bytes=4096) as engine,
        engine.open(folder / "data", "w", size=len(content)) as file,
    ):
        engine.write(file, 0, content).result()
        file.sync()
        found = bytearray(len(content))
        engine.read(file, 0, found).result()
        assert found == content
    sync_directory(folder)


def check_io(folder: Path, numbers: range) -> None:
    io(folder)
    before = Remains.of(folder)
    for number in numbers:
        lines = interrupt(lambda: io(folder), number)
        assert lines.line
        (folder / "data").touch()
        assert Remains.of(folder) == before, lines.line
        io(folder)


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
@pytest.mark.timeout(120)
def test_interrupted_engine_leaves_no_descriptor_thread_or_wait(tmp_path: Path) -> None:
    total = interrupt(lambda: io(tmp_path), None).seen
    check_io(tmp_path, sampled(total, NUM_SAMPLES))
