"""The data files as the rest of the world sees them: stock safetensors, stock torch DCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from checkpoint.format.elements import BY_TORCH
from tests.checkpoint.trees import bits

DCP_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_reads_back_with_stock_safetensors_bit_for_bit(tmp_path: Path) -> None:
    state = {}
    for name, dtype in ((element.name, dtype) for dtype, element in BY_TORCH.items()):
        raw = torch.arange(48 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
        empty = torch.empty(0, dtype=dtype)
        state[name] = empty.set_(raw.untyped_storage(), 0, (6, 8), (8, 1))
    checkpoint.save(state, tmp_path / "step")
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    read = load_file(file)
    assert set(state) <= set(read)
    for name, tensor in state.items():
        assert bits(read[name]) == bits(tensor), name
        assert read[name].shape[:2] == (6, 8)
        if name in {"float32", "bfloat16", "float8_e4m3fn", "complex64", "uint16", "bool", "int8"}:
            assert read[name].dtype == tensor.dtype


def test_stock_safetensors_reads_slices_and_metadata(tmp_path: Path) -> None:
    checkpoint.save({"m": {"w": torch.arange(12.0).view(3, 4)}}, tmp_path / "step")
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.get_slice("m.w")[1:].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert opened.metadata()["format"] == "pt"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("num_stripes", [1, 3])
def test_stock_dcp_merges_the_row_ranges_of_all_stripes(tmp_path: Path, num_stripes: int) -> None:
    stripes = [tmp_path / f"ssd{k}" for k in range(num_stripes)]
    for stripe in stripes:
        stripe.mkdir()
    state: dict[str, Any] = {
        f"big.{dtype}": (torch.randn(3001, 1777) * 9).to(dtype) for dtype in DCP_DTYPES
    }
    state |= {"small": torch.arange(7), "zero_d": torch.tensor(4.0), "middle": torch.randn(999)}
    checkpoint.save(state, tmp_path / "step", stripes)
    folder = tmp_path / "together"
    folder.mkdir()
    for file in tmp_path.glob("ssd*/*/*.safetensors"):
        (folder / file.name).symlink_to(file)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    reader = HuggingFaceStorageReader(str(folder))
    dcp_load(live, storage_reader=reader, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(live[name], tensor), name


def test_the_manifest_is_json_that_anybody_can_read(tmp_path: Path) -> None:
    checkpoint.save({"step": 3, "w": torch.ones(2)}, tmp_path / "step")
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert manifest["format"] == "infinity-checkpoint"
    assert manifest["tree"] == {"dict": {"step": 3, "w": {"tensor": 0}}}
    assert manifest["tensors"][0]["shape"] == [2]
