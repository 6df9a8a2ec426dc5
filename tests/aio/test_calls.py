"""Calls on a file while other threads write to it or close it; and what they refuse."""

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aio import AioError, Engine
from tests.aio.conftest import random_bytes, run_python

if TYPE_CHECKING:
    from aio.operation import BufferLike


def test_failed_allocation_keeps_what_a_write_beside_it_wrote(tmp_path: Path) -> None:
    data = random_bytes(1 << 20)
    with Engine("posix") as engine:
        for number in range(40):
            with engine.open(tmp_path / f"{number}", "w") as file:
                operation = engine.write(file, 0, data)
                with pytest.raises(AioError, match="cannot allocate"):
                    file.allocate(0, (1 << 63) - 1)
                assert operation.result() == len(data)
                assert file.size() == len(data)


def test_file_closed_beside_a_sync_keeps_its_descriptor_until_the_sync_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    sync = os.fsync

    def slow_sync(fd: int) -> None:
        begun.set()
        assert may_end.wait(20)
        sync(fd)

    with Engine("posix") as engine:
        file = engine.open(tmp_path / "x", "w")
        errors: list[BaseException] = []

        def run() -> None:
            try:
                file.sync()
            except BaseException as error:
                errors.append(error)

        monkeypatch.setattr(os, "fsync", slow_sync)
        syncing, closing = threading.Thread(target=run), threading.Thread(target=file.close)
        syncing.start()
        assert begun.wait(20)
        closing.start()
        while not file.is_closed:
            pass
        held = file._fd
        may_end.set()
        syncing.join(20)
        closing.join(20)
        assert held >= 0
        assert file._fd == -1
        assert not closing.is_alive()
        assert not errors
        with pytest.raises(ValueError, match="is closed"):
            file.truncate(0)


def test_length_beyond_what_files_have_is_refused(tmp_path: Path) -> None:
    with (
        Engine("posix") as engine,
        engine.open(tmp_path / "x", "w") as file,
        pytest.raises(ValueError, match="cannot truncate"),
    ):
        file.truncate(1 << 63)


class _Structure(ctypes.Structure):
    _fields_ = (("O", ctypes.c_int), ("two", ctypes.py_object))


@pytest.mark.parametrize(
    "buffer",
    [
        np.array([object()] * 512),
        np.array([object()] * 512).data,
        np.zeros(256, dtype=[("O", "i8"), ("two", "O")]),
        (ctypes.py_object * 512)(),
        (_Structure * 256)(),
    ],
    ids=["array", "view", "records", "ctypes", "structures"],
)
def test_buffer_of_references_to_objects_is_refused(tmp_path: Path, buffer: "BufferLike") -> None:
    (tmp_path / "x").write_bytes(b"A" * 4096)
    with Engine("posix") as engine, engine.open(tmp_path / "x", "r+") as file:
        for transfer in (engine.read, engine.write):
            with pytest.raises(TypeError, match="references to Python objects"):
                transfer(file, 0, buffer)


@pytest.mark.parametrize("dtype", [[("O", "i4"), ("OO", "f4")], "M8[s]", ">f4", "S8"])
def test_buffer_of_other_values_takes_the_bytes_of_the_file(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "x").write_bytes(b"A" * 4096)
    buffer = np.zeros(8, dtype)
    with Engine("posix") as engine, engine.open(tmp_path / "x") as file:
        engine.read(file, 0, buffer).result()
    assert buffer.tobytes() == b"A" * buffer.nbytes


_FORK = """
    import os, sys
    from aio import Engine

    with Engine("posix") as engine, engine.open(sys.argv[1], "w", size=4096) as file:
        if not os.fork():
            for change in (lambda: file.allocate(0, 8192), lambda: file.truncate(0)):
                try:
                    change()
                except RuntimeError as error:
                    print(str(error).partition(":")[0].replace(str(os.getpid()), "CHILD"))
            file.sync()
            print(file.size(), flush=True)
            os._exit(0)
        os.wait()
"""


def test_length_is_not_changed_by_a_forked_child_whose_parent_may_have_the_file_locked(
    tmp_path: Path,
) -> None:
    *refusals, size = run_python(_FORK, str(tmp_path / "x"))
    assert len(refusals) == 2
    assert all("in process CHILD, which was forked from it" in line for line in refusals)
    assert size == "4096"
