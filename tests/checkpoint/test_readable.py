"""What would not load is not published: refused before anything is made, or before the end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.format.manifest import decode_manifest, encode_manifest
from checkpoint.format.records import ChunkRecord, FileRecord, Manifest, TensorRecord
from checkpoint.plan.ownership import OwnedRanges, share_out
from checkpoint.saving.data_files import RankFiles


def nested_dtype(depth: int) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(np.float32)
    for _ in range(depth):
        dtype = np.dtype([("inner", dtype)])
    return dtype


class Source:
    """A byte source of too many dimensions."""

    dtype = torch.float32
    shape = (1,) * 65

    def read(self, start: int, out: memoryview) -> None:
        raise AssertionError("nothing is read before everything is checked")


def freed(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A tensor of whose storage this much is left, as FSDP leaves parameters it has gathered."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


REFUSED: dict[str, Callable[[], Any]] = {
    "65 dimensions": lambda: torch.zeros((1,) * 65),
    "65 dimensions of a source": Source,
    "64 dimensions and raw bytes": lambda: np.zeros((1,) * 64, ">f4"),
    "a nested dtype": lambda: np.zeros(3, nested_dtype(20)),
    "a scalar of a nested dtype": lambda: np.zeros((), nested_dtype(20))[()],
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "a tensor without data": lambda: torch.empty(3, device="meta"),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a freed storage": lambda: freed(torch.ones(100), 0),
    "part of a storage": lambda: freed(torch.ones(100)[::2], 392),
    "two halves of a character": lambda: "x\ud83d\ude00",
    "two halves of a character in a key": lambda: {("\ud83d\ude00", 1): 1},
    "a negative that torch cannot compute": lambda: torch._neg_view(
        torch.ones(3).to(torch.float8_e5m2)
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_would_not_load_is_refused_by_path_and_touches_nothing(
    tmp_path: Path, what: str
) -> None:
    value = REFUSED[what]()
    with pytest.raises((TypeError, ValueError), match=r"state\['a'\]\[1\]"):
        checkpoint.save({"a": [0, value]}, tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def test_the_most_that_is_allowed_loads(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "dimensions": torch.ones((1,) * 64),
        "nested": np.ones(3, nested_dtype(16)),
        "scalar": np.ones((), nested_dtype(16))[()],
    }
    checkpoint.save(state, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step")
    assert torch.equal(loaded["dimensions"], state["dimensions"])
    assert loaded["nested"].dtype == nested_dtype(16)
    assert loaded["nested"].tobytes() == state["nested"].tobytes()
    assert loaded["scalar"] == state["scalar"]


def manifest_of_rows(rows: int) -> Manifest:
    """A tensor of which every row is a chunk in a file of its own."""
    files = [
        FileRecord(None, f"00c0ffee/r{row}-0.safetensors", 8192, 4096, 0) for row in range(rows)
    ]
    chunks = [ChunkRecord(row, 4096, 4, (row,), (1,), (0,)) for row in range(rows)]
    tensor = TensorRecord("w", "float32", (rows,), tuple(chunks))
    return Manifest("00c0ffee", rows, (), tuple(files), (), (tensor,), {"tensor": 0})


def test_a_manifest_is_not_encoded_if_it_would_not_decode() -> None:
    decode_manifest(encode_manifest(manifest_of_rows(4096)))
    with pytest.raises(ValueError, match=r"'w'.*4097 chunks"):
        encode_manifest(manifest_of_rows(4097))


def test_data_files_that_are_gone_when_all_is_written_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step"
    checkpoint.save({"x": torch.ones(3)}, path)
    sync = RankFiles.sync

    def sync_and_lose(files: RankFiles) -> None:
        sync(files)
        published = (path / "manifest.json").read_text()
        for file in path.glob("*/r0-0.safetensors"):
            if file.parent.name not in published:
                file.unlink()

    monkeypatch.setattr(RankFiles, "sync", sync_and_lose)
    with pytest.raises(FileNotFoundError, match="not published"):
        checkpoint.save({"x": torch.zeros(3)}, path)
    assert torch.equal(checkpoint.load(path)["x"], torch.ones(3))
    assert checkpoint.verify(path).ok


def test_more_ranges_than_readers_take_are_refused_before_anything_is_written() -> None:
    def owned(count: int, rank: int) -> list[OwnedRanges]:
        ranges = tuple((first, 1) for first in range(rank, count, 2))
        return [OwnedRanges("w", "float32", (count,), ranges)]

    share_out([owned(4096, 0), owned(4096, 1)])
    with pytest.raises(ValueError, match=r"'w' would be stored in 4097 chunks"):
        share_out([owned(4097, 0), owned(4097, 1)])


@pytest.mark.parametrize("first", [0, 2, 4, 7])
def test_ranges_of_nothing_are_written_by_nobody(first: int) -> None:
    """As a rank has of a tensor that is cut into fewer parts than there are ranks."""

    def owned(*ranges: tuple[int, int]) -> list[OwnedRanges]:
        return [OwnedRanges("w", "float32", (7,), ranges)]

    assert share_out([owned((0, 4)), owned((first, 0)), owned((4, 3))]) == [
        [(0, 0, 4)],
        [],
        [(0, 4, 3)],
    ]


@pytest.mark.parametrize("ranges", [(), ((0, 0),)])
def test_tensor_of_nothing_that_ranks_have_in_ranges_is_written_once(
    ranges: tuple[tuple[int, int], ...],
) -> None:
    owned = [OwnedRanges("w", "float32", (0, 3), ranges)]
    assert share_out([owned, owned]) == [[(0, 0, 0)], []]


@pytest.mark.parametrize("more", [(3, 4), (0, 7), (7, 1), (8, 2), (7, -7)])
def test_ranges_beside_those_of_the_whole_tensor_are_refused(more: tuple[int, int]) -> None:
    owned = [[OwnedRanges("w", "float32", (7,), (held,))] for held in ((0, 7), more)]
    with pytest.raises(ValueError, match=r"'w' once: of 7, the first"):
        share_out(owned)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_keys_that_json_would_make_one_are_refused(tmp_path: Path, kind: type) -> None:
    state = {"a": kind({"\ud83d\ude00": 1, "\U0001f600": 2})}
    with pytest.raises(TypeError, match=r"state\['a'\].*surrogate pair"):
        checkpoint.save(state, tmp_path / "step")
    fine = [kind({"\ude00\ud83d": 1, "\U0001f600": 2, "\ud83d": 3})]
    checkpoint.save(fine, tmp_path / "step")
    assert checkpoint.load(tmp_path / "step") == fine
