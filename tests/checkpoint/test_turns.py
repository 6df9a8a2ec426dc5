"""Objects that read or write themselves are called by one thread at a time, unless they ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint.tensors.turns import in_turn

NBYTES = 24 << 20


class Positioned:
    """Seeks and then moves bytes, as a file does, and notices a second thread."""

    dtype = torch.uint8
    shape = (NBYTES,)

    def __init__(self) -> None:
        self.data = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
        self.shared = 0
        self._inside = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        is_alone = self._inside.acquire(blocking=False)
        self.shared += not is_alone
        try:
            threading.Event().wait(0)  # lets other threads run
            yield
        finally:
            if is_alone:
                self._inside.release()

    def read(self, start: int, out: memoryview) -> None:
        with self._alone():
            torch.frombuffer(out, dtype=torch.uint8).copy_(self.data[start : start + len(out)])

    def write(self, start: int, data: memoryview) -> None:
        with self._alone():
            self.data[start : start + len(data)] = torch.frombuffer(data, dtype=torch.uint8)


@pytest.fixture
def stripes(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"ssd{k}" for k in range(3)]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("background", [False, True])
def test_a_source_over_stripes_is_read_by_one_thread_at_a_time(
    tmp_path: Path, stripes: list[Path], background: bool
) -> None:
    source = Positioned()
    if background:
        checkpoint.save_async({"w": source}, tmp_path / "step", stripes).result()
    else:
        checkpoint.save({"w": source}, tmp_path / "step", stripes)
    assert source.shared == 0
    assert torch.equal(checkpoint.load(tmp_path / "step")["w"], source.data)


def test_a_source_of_one_disk_is_copied_by_one_thread_at_a_time(tmp_path: Path) -> None:
    source = Positioned()
    checkpoint.save_async({"w": source}, tmp_path / "step").result()
    assert source.shared == 0


def test_a_sink_is_written_by_one_thread_at_a_time(tmp_path: Path, stripes: list[Path]) -> None:
    saved = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8).flip(0)
    checkpoint.save({"w": saved}, tmp_path / "step", stripes)
    sink = Positioned()
    checkpoint.load(tmp_path / "step", into={"w": sink})
    assert sink.shared == 0
    assert torch.equal(sink.data, saved)


class Meeting:
    """Whose calls return when there are two of them."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def read(self, start: int, out: memoryview) -> None:
        self._barrier.wait(timeout=20)


class SafeMeeting(Meeting):
    thread_safe = True


def call_twice(first: object, second: object) -> list[bool]:
    """Whether calls of the two, on two threads, ended well."""
    ended: list[bool] = []

    def call(owner: object) -> None:
        assert isinstance(owner, Meeting)
        try:
            in_turn(owner, owner.read)(0, memoryview(b""))
            ended.append(True)
        except threading.BrokenBarrierError:
            ended.append(False)

    threads = [threading.Thread(target=call, args=(owner,)) for owner in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_an_object_that_says_that_it_is_thread_safe_is_called_by_several_threads() -> None:
    meeting = SafeMeeting()
    assert call_twice(meeting, meeting) == [True, True]


def test_two_objects_do_not_wait_for_each_other() -> None:
    one, other = Meeting(), Meeting()
    other._barrier = one._barrier
    assert call_twice(one, other) == [True, True]
