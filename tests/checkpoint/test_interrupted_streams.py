"""Streams that are interrupted at any line: nothing is lost or left, and a read can be repeated."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sweep_saves import Footing, Interrupter

import checkpoint

pytestmark = pytest.mark.filterwarnings(
    # The standard library frees threads in Python, and swallows an interrupt that comes there.
    "ignore:Exception ignored in. <function WeakSet:pytest.PytestUnraisableExceptionWarning"
)
DATA = np.random.default_rng(5).integers(0, 256, 40_000, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("checkpoint.streams._BLOCK_BYTES", 4096)
    monkeypatch.setattr("checkpoint.streams._SMALL_READ_BYTES", 512)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted_at(work: Callable[[], None], first: int, every: int) -> Iterator[int]:
    """Interrupts the work at every so many of its lines; nothing is held after each."""
    work()
    interrupter, footing, target = Interrupter(), Footing.now(), first
    while True:
        came = interrupter.run(work, target, on_main=True, number=signal.SIGINT)
        if not came and interrupter.lines <= target:
            return
        assert footing.lost() == [], target
        yield target
        target += every


def test_an_interrupt_at_any_line_leaves_no_exception_in_hand() -> None:
    interrupter, target = Interrupter(), 0
    while interrupter.run(_suppress, target, on_main=True, number=signal.SIGINT):
        assert sys.exc_info()[1] is None, target
        target += 1
    assert target == 3


def _suppress() -> None:
    try:
        raise AttributeError
    except AttributeError:
        pass


def test_reading_that_is_interrupted_at_any_line_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)

    def read() -> None:
        with checkpoint.open_stream(path) as stream:
            assert stream.read(5000) == DATA[:5000]
            stream.seek(30_000)
            assert stream.read(100) == DATA[30_000:30_100]
            stream.seek(0)
            assert stream.read() == DATA

    assert len(list(interrupted_at(read, first=5, every=43))) > 20


def test_a_stream_goes_on_behind_a_read_that_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    interrupter = Interrupter()
    target = 0
    with checkpoint.open_stream(tmp_path / "file") as stream:

        def read() -> None:
            stream.read()

        while True:
            stream.seek(4096 * (target % 9))
            if not interrupter.run(read, target, on_main=True, number=signal.SIGINT):
                break
            stream.seek(0)
            assert stream.read() == DATA, target
            target += 7
    assert target > 50


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")  # before it is in a `with`
def test_writing_that_is_interrupted_at_any_line_leaves_the_old_file_or_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"

    def write() -> None:
        with checkpoint.open_stream(path, "wb") as stream:
            for start in range(0, len(DATA), 9000):
                stream.write(DATA[start : start + 9000])

    path.write_bytes(b"old")
    count = 0
    for target in interrupted_at(write, first=5, every=61):
        assert path.read_bytes() in (b"old", DATA), target
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"], target
        path.write_bytes(b"old")
        count += 1
    assert count > 10
