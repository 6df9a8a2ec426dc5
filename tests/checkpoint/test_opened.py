"""Pieces of tensors of a checkpoint that is held open: the right bytes, each read once."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import checkpoint
from checkpoint.loading import opened
from checkpoint.loading.opened import OpenCheckpoint, open_current
from tests.support.interrupts import interrupt_behind_call


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each block that is read, none of which is kept for the next read."""
    counted: list[int] = []
    finish = OpenCheckpoint._finish

    def counting(self: OpenCheckpoint, read: Any) -> None:
        finish(self, read)
        counted.append(len(read.into))

    monkeypatch.setattr(OpenCheckpoint, "_finish", counting)
    monkeypatch.setattr(opened, "_KEPT_BYTES", 0)
    return counted


def test_an_export_of_a_transposed_view_reads_the_tensor_once(
    tmp_path: Path, reads: list[int]
) -> None:
    weight = torch.arange(5 << 20, dtype=torch.int32).view(1 << 10, -1)
    state = {"w": weight, "wt": weight.t(), "odd": weight[:, ::2]}
    checkpoint.save(state, tmp_path / "step")
    for name in ("wt", "odd"):
        reads.clear()
        (file, _) = checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out", only=name)
        assert sum(reads) <= weight.nbytes
        assert torch.equal(load_file(file)[name], state[name])


@given(st.data())
def test_a_range_of_an_array_gets_of_a_box_what_is_in_it(data: st.DataObject) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    begin = [data.draw(st.integers(0, size - 1)) for size in whole]
    shape = [data.draw(st.integers(1, size - low)) for size, low in zip(whole, begin, strict=True)]
    count = math.prod(whole)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    values = np.arange(1, count + 1, dtype=np.uint16).astype(np.uint8).reshape(whole)
    box = tuple(slice(low, low + size) for low, size in zip(begin, shape, strict=True))
    expected = np.zeros_like(values)
    expected[box] = values[box]
    out = bytearray(last - first)
    opened._copy_box(whole, tuple(begin), values[box], first, memoryview(out))
    assert bytes(out) == expected.reshape(-1)[first:last].tobytes()


def test_columns_that_ranks_saved_are_read_a_block_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)
    sizes: list[int] = []

    def read_chunk(_: Any, record: Any, chunk: Any, first: int, out: memoryview) -> None:
        sizes.append(len(out))
        low, columns = chunk.start[1], chunk.shape[1]
        box = np.ascontiguousarray(weight[:, low : low + columns]).view(np.uint8).reshape(-1)
        out[:] = box[first : first + len(out)].data

    monkeypatch.setattr(opened, "CRC_BLOCK_BYTES", 4096)
    monkeypatch.setattr(OpenCheckpoint, "_read_chunk", read_chunk)
    chunks = [
        SimpleNamespace(start=(0, low), shape=(512, columns))
        for low, columns in ((0, 40), (40, 24))
    ]
    record: Any = SimpleNamespace(
        shape=weight.shape, element=SimpleNamespace(itemsize=4), chunks=chunks
    )
    checkpoint.save({"w": torch.ones(1)}, tmp_path / "step")
    with open_current(tmp_path / "step") as held:
        for first, last in ((0, weight.nbytes), (1000, 70_000), (256, 260)):
            found = bytearray(last - first)
            held.read(record, first, memoryview(found))
            assert bytes(found) == weight.tobytes()[first:last]
    assert max(sizes) <= 4096


def test_a_checkpoint_that_is_forgotten_open_is_closed_without_running_python(
    tmp_path: Path,
) -> None:
    checkpoint.save({"w": torch.ones(5)}, tmp_path / "step")
    calls: list[str] = []
    held = open_current(tmp_path / "step")
    assert open_data_files() == 2
    gc.collect()
    sys.setprofile(
        lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None
    )
    del held
    sys.setprofile(None)
    ours = str(Path(checkpoint.__file__).parent)
    assert [name for name in calls if name.startswith(ours)] == []
    deadline = time.monotonic() + 20  # the engine's own threads let go of it
    while open_data_files() and time.monotonic() < deadline:
        os.sched_yield()
    assert open_data_files() == 0


def open_data_files() -> int:
    """Descriptors of this process."""
    links = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    return sum(link.endswith(".safetensors") for link in links)


def test_a_child_forked_while_a_block_is_read_is_refused_and_does_not_wait(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(5)}, tmp_path / "step")
    with open_current(tmp_path / "step") as held:
        (record,) = held.manifest.tensors
        with held._lock.here(), held._span_lock.here():
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    held.span(record, 0, 20)
                except RuntimeError as error:
                    os._exit("was forked" not in str(error))
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_checkpoint_whose_reading_was_interrupted_is_read_by_other_threads(
    tmp_path: Path,
) -> None:
    checkpoint.save({"w": torch.arange(100.0)}, tmp_path)
    with open_current(tmp_path) as held:
        record, found = held.manifest.tensors[0], bytearray(400)

        def read() -> None:
            held.forget_blocks()
            held.read(record, 0, memoryview(found))

        for number in range(interrupt_behind_call(read, None).seen):
            came = interrupt_behind_call(read, number)
            other = threading.Thread(target=read, daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive(), came.line
        assert bytes(found) == torch.arange(100.0).numpy().tobytes()
