"""Pieces of tensors of a checkpoint that is held open: the right bytes, each read once."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
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
    monkeypatch.setattr(opened, "KEPT_BYTES", 0)
    return counted


def test_an_export_of_a_transposed_view_reads_the_tensor_once(
    tmp_path: Path, reads: list[int]
) -> None:
    weight = torch.arange(5 << 20, dtype=torch.int32).view(1 << 10, -1)
    checkpoint.save({"w": weight, "wt": weight.t()}, tmp_path / "step")
    (file, _) = checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out", only="wt")
    assert sum(reads) <= weight.nbytes
    assert torch.equal(load_file(file)["wt"], weight.t())


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
                    held.span(record, 0, 20, 20)
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
