"""What `torch.distributed.checkpoint` loads into: other dtypes, other memory, boxes of any cut."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.int64, torch.int32),
    (torch.int32, torch.float32),
    (torch.float32, torch.complex64),
    (torch.float32, torch.float8_e4m3fn),
]


def save(state: dict[str, Any], path: Path) -> None:
    dcp_save(state, storage_writer=checkpoint.dcp.StorageWriter(path))


def load(live: dict[str, Any], path: Path) -> None:
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(path))


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)


@pytest.mark.parametrize(("saved", "live"), PAIRS, ids=lambda dtype: str(dtype)[6:])
def test_a_target_of_another_dtype_gets_converted_values_and_nothing_beyond_it(
    tmp_path: Path, saved: torch.dtype, live: torch.dtype
) -> None:
    stored = values(5000, saved)
    save({"x": stored}, tmp_path / "step")
    memory = torch.full((20_000,), 7.0).to(live)
    load({"x": memory[5000:10_000]}, tmp_path / "step")
    expected = torch.full((20_000,), 7.0).to(live)
    expected[5000:10_000].copy_(stored)
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_of_other_strides_gets_what_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = values(60 * 40, torch.float32).view(60, 40)
    save({"x": stored}, tmp_path / "step")
    live = torch.zeros(40, 60, dtype=dtype).t()
    load({"x": live}, tmp_path / "step")
    assert torch.equal(live, stored.to(dtype))


def test_a_view_of_another_tensor_is_converted_too(tmp_path: Path) -> None:
    whole = values(6000, torch.float32)
    checkpoint.save({"whole": whole, "part": whole[100:5100]}, tmp_path / "step")
    live = {"part": torch.zeros(5000, dtype=torch.bfloat16)}
    load(live, tmp_path / "step")
    assert torch.equal(live["part"], whole[100:5100].to(torch.bfloat16))


def test_a_conjugated_target_gets_the_values(tmp_path: Path) -> None:
    stored = torch.complex(torch.arange(50.0), torch.arange(50.0))
    save({"x": stored}, tmp_path / "step")
    live = torch.zeros(50, dtype=torch.complex64).conj()
    load({"x": live}, tmp_path / "step")
    assert torch.equal(live, stored)


def test_a_target_without_memory_is_refused_by_name(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, tmp_path / "step")
    with pytest.raises(TypeError, match="x has no plain memory"):
        read_box(tmp_path / "step", (0,), torch.zeros(3, device="meta"))


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor has that is made meanwhile."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) or "zeros" in str(func):
            self.nbytes = max(self.nbytes, result.numel() * result.element_size())
        return result


def read_box(path: Path, start: tuple[int, ...], target: torch.Tensor) -> int:
    """Loads a box of tensor x; gives the bytes of the largest tensor made for it."""
    reader = checkpoint.dcp.StorageReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    box = ChunkStorageMetadata(torch.Size(start), target.shape)
    stored: Any = metadata.state_dict_metadata["x"]
    items = create_read_items_for_chunk_list("x", stored, [box])
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: target.__getitem__(
            tuple(
                slice(low, low + size)
                for low, size in zip(item.dest_offsets, item.lengths, strict=True)
            )
        ),
        commit_tensor=lambda item, tensor: None,
    )
    with Largest() as largest:
        reader.read_data(LoadPlan(items), planner)
    return largest.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_picked_out_without_memory_for_the_whole(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = values(400 * 300 * 7, torch.float32).view(400, 300, 7)
    save({"x": stored}, tmp_path / "step")
    target = torch.zeros(390, 20, 5, dtype=dtype)
    assert read_box(tmp_path / "step", (3, 50, 1), target) <= 1024
    assert torch.equal(target, stored[3:393, 50:70, 1:6].to(dtype))


def test_columns_of_a_view_are_picked_out_without_memory_for_the_whole(tmp_path: Path) -> None:
    whole = values(400 * 300, torch.float32)
    checkpoint.save({"whole": whole, "x": whole[300:].view(399, 300)}, tmp_path / "step")
    target = torch.zeros(399, 20)
    assert read_box(tmp_path / "step", (0, 50), target) <= 1024
    assert torch.equal(target, whole[300:].view(399, 300)[:, 50:70])
