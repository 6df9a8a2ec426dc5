"""Many data files and many tensors: neither descriptors nor mappings grow with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import checkpoint
from checkpoint.tensors import assembly
from tests.checkpoint.trees import assert_same
from tests.support.memory import folder_in_memory
from tests.support.scripts import Script

tmp_path = folder_in_memory()

NUM_FILES = 110

READ_WITH_FEW_DESCRIPTORS = """
import resource, sys, torch, checkpoint
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
path, num_files = sys.argv[1], int(sys.argv[2])
expected = [torch.full((3,), float(k)) for k in range(num_files)]
for verify in (True, False):
    loaded = checkpoint.load(path, verify=verify)
    assert all(map(torch.equal, loaded, expected))
into = [torch.zeros(3) for _ in expected]
checkpoint.load(path, into=into)
assert all(map(torch.equal, into, expected))
assert checkpoint.verify(path).ok
group = checkpoint.open_zarr(path)
for _ in range(2):
    assert [float(group[str(k)][0]) for k in range(num_files)] == list(range(num_files))
del group
checkpoint.export_safetensors(path, path + "-exported")
"""


def test_many_data_files_are_read_with_few_descriptors(tmp_path: Path) -> None:
    stripes = [tmp_path / f"ssd{k}" for k in range(NUM_FILES)]
    for stripe in stripes:
        stripe.mkdir()
    state = [torch.full((3,), float(k)) for k in range(NUM_FILES)]
    assert checkpoint.save(state, tmp_path / "step", stripes).num_files == NUM_FILES
    script = Script(READ_WITH_FEW_DESCRIPTORS, tmp_path / "step", NUM_FILES)
    _, errors = script.end()
    assert script.returncode == 0, errors


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_many_tensors_are_loaded_into_few_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MIN_MAPPED_BYTES", 4096)
    state = [torch.full((1025 + k,), k) for k in range(1000)]
    checkpoint.save(state, tmp_path / "step")
    before = num_mappings()
    loaded = checkpoint.load(tmp_path / "step")
    assert num_mappings() - before < 100
    assert_same(state, loaded)
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in loaded)


def test_memory_of_a_tensor_is_given_back_while_its_neighbours_live(tmp_path: Path) -> None:
    state = {name: torch.ones(8 << 20) for name in "abc"}
    checkpoint.save(state, tmp_path / "step")
    del state
    loaded: dict[str, Any] = checkpoint.load(tmp_path / "step")
    process = psutil.Process()
    before = process.memory_info().rss
    del loaded["b"]
    assert before - process.memory_info().rss > 24 << 20
    assert torch.equal(loaded["a"], torch.ones(8 << 20))
    assert torch.equal(loaded["c"], torch.ones(8 << 20))
