"""Sources that have to be read are read several at once, ahead of the writing."""

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import checkpoint
from checkpoint import threads
from checkpoint.format.datafile import ALIGNMENT
from tests.support.proof import matrix

MIB = 1 << 20


class Meeting:
    """A byte source of whose reads one returns when another one is under way."""

    dtype = torch.uint8
    thread_safe = True

    def __init__(self, nbytes: int, fails_at: int | None = None) -> None:
        self.shape = (nbytes,)
        self.values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self.most_at_once = 0
        self._fails_at = fails_at
        self._lock = threading.Lock()
        self._met = threading.Event()
        self._under_way = 0

    def read(self, start: int, out: memoryview) -> None:
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            if self._under_way == 2:
                self._met.set()  # nobody waits again
        try:
            if not self._met.wait(5):
                self._met.set()
            if self._fails_at is not None and start >= self._fails_at:
                raise LookupError(f"nothing at {start}")
            out[:] = self.values[start : start + len(out)].numpy().data
        finally:
            with self._lock:
                self._under_way -= 1

    @property
    def is_idle(self) -> bool:
        return self._under_way == 0


@pytest.mark.parametrize("way", ["save", "export"])
def test_sources_are_read_several_at_once(tmp_path: Path, way: str) -> None:
    source = Meeting(24 * MIB + 5)
    first, small = torch.ones(3 * MIB), torch.ones(7)
    state = {"first": first, "source": source, "small": small}
    if way == "save":
        checkpoint.save(state, tmp_path / "run")
        loaded = checkpoint.load(tmp_path / "run")
    else:
        file, _ = checkpoint.write_safetensors(state, tmp_path / "run")
        loaded = safetensors.torch.load_file(file)
    assert source.most_at_once > 1
    assert torch.equal(loaded["source"], source.values)
    assert torch.equal(loaded["first"], first)
    assert torch.equal(loaded["small"], small)


@pytest.mark.parametrize("staging_bytes", matrix([2 * ALIGNMENT, 3 * MIB], usual=[2 * ALIGNMENT]))
def test_little_memory_is_enough_to_read_ahead_in(tmp_path: Path, staging_bytes: int) -> None:
    source = Meeting(MIB + 5)
    file, _ = checkpoint.write_safetensors(
        {"source": source, "other": torch.ones(1000)}, tmp_path, staging_bytes=staging_bytes
    )
    assert torch.equal(safetensors.torch.load_file(file)["source"], source.values)


@pytest.mark.parametrize("way", ["save", "export"])
def test_a_source_that_fails_is_raised_when_nothing_is_read_any_more(
    tmp_path: Path, way: str
) -> None:
    source = Meeting(24 * MIB, fails_at=8 * MIB)
    write = checkpoint.save if way == "save" else checkpoint.write_safetensors
    with pytest.raises(LookupError, match="nothing at"):
        write({"source": source}, tmp_path / "run")
    assert source.is_idle
    assert not list(tmp_path.rglob("*.safetensors"))


def test_tensors_of_whole_pages_begin_at_pages_of_an_export(tmp_path: Path) -> None:
    state = {
        "odd": torch.ones(5, dtype=torch.float64),
        "half": torch.ones(ALIGNMENT, dtype=torch.bfloat16),
        "single": torch.ones(ALIGNMENT),
        "small": torch.ones(3, dtype=torch.bfloat16),
    }
    file, _ = checkpoint.write_safetensors(state, tmp_path)
    raw = file.read_bytes()
    first = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:first])
    for name in ("half", "single"):
        assert (first + header[name]["data_offsets"][0]) % ALIGNMENT == 0
    for name, tensor in safetensors.torch.load_file(file).items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("way", ["save", "export"])
def test_fewer_threads_than_are_wanted_are_enough(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = threads.started, list[str]()

    def started(run: Any, name: str) -> threading.Thread:
        if name.startswith("checkpoint-fill") and begun:
            raise OSError(errno.EAGAIN, f"cannot start the thread {name}")
        if name.startswith("checkpoint-fill"):
            begun.append(name)
        return begin(run, name)

    monkeypatch.setattr(threads, "started", started)
    values = torch.randn(3000, 3000)
    if way == "save":
        checkpoint.save({"turned": values.t()}, tmp_path / "step")
        assert torch.equal(checkpoint.load(tmp_path / "step")["turned"], values.t())
    else:
        checkpoint.write_safetensors({"turned": values.t()}, tmp_path / "out")
    assert len(begun) == 1


class Saving:
    """A byte source that saves while it is read."""

    dtype = torch.float32
    shape = (MIB,)

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, start: int, out: memoryview) -> None:
        if not start:
            checkpoint.save_async({"x": torch.ones(3)}, self.path).result()
        out[:] = bytes(len(out))


def test_a_source_that_saves_to_the_path_it_is_saved_to_is_told(tmp_path: Path) -> None:
    checkpoint.save_async({"source": Saving(tmp_path / "other")}, tmp_path / "step").result()
    assert checkpoint.load(tmp_path / "other")["x"].tolist() == [1, 1, 1]
    pending = checkpoint.save_async({"source": Saving(tmp_path / "step")}, tmp_path / "step")
    with pytest.raises(BlockingIOError, match="is still running, and asks this thread"):
        pending.result()
    assert list(checkpoint.load(tmp_path / "step")) == ["source"]
