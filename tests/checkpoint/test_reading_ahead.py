"""Sources that have to be read are read several at once, ahead of the writing."""

import json
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

import checkpoint
from checkpoint.format.datafile import ALIGNMENT

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


@pytest.mark.parametrize("staging_bytes", [2 * ALIGNMENT, 3 * MIB])
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
