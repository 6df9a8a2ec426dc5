"""Checkpoints through zarr: the store by zarr's own conformance suite, the groups, references."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.storage import FsspecStore
from zarr.testing.store import StoreTests

import checkpoint
from checkpoint.format.elements import BY_TORCH
from checkpoint.interop.zarr_layout import array_layout, node_paths
from checkpoint.interop.zarr_store import Blob, BytesBlob, CheckpointBlobs, ReadOnlyStore
from tests.checkpoint.trees import bits
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


class DictStore(ReadOnlyStore):
    """The store over a dict that can be filled, so that zarr's suite has something to read."""

    def __init__(self, blobs: dict[str, Blob], *, read_only: bool = False) -> None:
        super().__init__(blobs, read_only=read_only)
        self.content = blobs

    @property
    def supports_writes(self) -> bool:
        return True

    @property
    def supports_deletes(self) -> bool:
        return True

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        self.content[key] = BytesBlob(value.to_bytes())

    async def delete(self, key: str) -> None:
        self._check_writable()
        self.content.pop(key, None)


class TestReadOnlyStore(StoreTests[DictStore, cpu.Buffer]):
    store_cls = DictStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"blobs": {}}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> DictStore:
        return asyncio.run(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> DictStore:
        return self.store_cls(**store_kwargs)

    async def set(self, store: DictStore, key: str, value: Buffer) -> None:
        store.content[key] = BytesBlob(value.to_bytes())

    async def get(self, store: DictStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.content[key].read(0, 1 << 40))

    def test_store_repr(self, store: DictStore) -> None:
        assert repr(store) == "DictStore({})"

    def test_store_supports_writes(self, store: DictStore) -> None:
        assert store.supports_writes
        assert not ReadOnlyStore({}).supports_writes

    def test_store_supports_listing(self, store: DictStore) -> None:
        assert store.supports_listing


@pytest.fixture
def state() -> dict[str, Any]:
    base = torch.randn(400, 300)
    return {
        "model": {
            "h.0.weight": torch.randn(3001, 1203),
            "h.0.bias": torch.randn(9).to(torch.bfloat16),
            "base": base,
            "rows": base[10:20],
            "columns": base[:, 3:5],
            "turned": torch.randn(20, 30).t(),
        },
        "f8": torch.randn(5000, 300).to(torch.float8_e4m3fn),
        "complex": torch.randn(7, dtype=torch.complex64),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 4),
        "array": np.arange(10, dtype=np.uint16).reshape(2, 5),
        "step": 3,
    }


@pytest.fixture
def path(tmp_path: Path, state: dict[str, Any]) -> Path:
    stripes = [tmp_path / f"ssd{k}" for k in range(3)]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save(state, tmp_path / "step", stripes)
    return tmp_path / "step"


def raw(array: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(array[...])).tobytes()


EXPECTED = {
    "model/h/0/weight": ("model", "h.0.weight"),
    "model/h/0/bias": ("model", "h.0.bias"),
    "model/base": ("model", "base"),
    "model/rows": ("model", "rows"),
    "model/columns": ("model", "columns"),
    "model/turned": ("model", "turned"),
    "f8": ("f8",),
    "complex": ("complex",),
    "flag": ("flag",),
    "none": ("none",),
}


def array(group: zarr.Group, place: str) -> zarr.Array[Any]:
    found = group[place]
    assert isinstance(found, zarr.Array)
    return found


def leaf(state: dict[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = state
    for key in keys:
        value = value[key]
    return value


def test_every_leaf_is_an_array_in_nested_groups(path: Path, state: dict[str, Any]) -> None:
    group = checkpoint.open_zarr(path)
    arrays = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert arrays == {*EXPECTED, "array"}
    for place, keys in EXPECTED.items():
        assert raw(group[place]) == bits(leaf(state, keys)), place
    assert raw(group["array"]) == state["array"].tobytes()
    weight = array(group, "model/h/0/weight")
    assert weight.shape == (3001, 1203)
    rows = np.asarray(weight[999:1002, 7])
    assert np.array_equal(rows, state["model"]["h.0.weight"][999:1002, 7])


def test_types_that_zarr_lacks_are_integers_with_their_name(path: Path) -> None:
    group = checkpoint.open_zarr(path)
    bias, f8 = array(group, "model/h/0/bias"), array(group, "f8")
    assert (str(bias.dtype), bias.attrs["dtype"]) == ("uint16", "bfloat16")
    assert (str(f8.dtype), f8.attrs["dtype"]) == ("uint8", "float8_e4m3fn")
    assert dict(group["complex"].attrs) == {}


LACKING: dict[str, Any] = {
    "big": np.arange(6, dtype=">f4").reshape(2, 3),
    "days": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "texts": np.array(["ab", "c"]),
    "bytes": np.array([b"a", b"bc"]),
    "records": np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8", (2,))]),
    "raw": np.zeros(3, "V1"),
}


def as_it_was(array: Any, dtype: Any) -> Any:
    """An array of a type that torch lacks, of the bytes and the attribute that zarr shows."""
    fields = [tuple(map(_tuple, field)) for field in dtype] if isinstance(dtype, list) else dtype
    described = np.lib.format.descr_to_dtype(fields)
    return np.ascontiguousarray(np.asarray(array[...])).view(described)[..., 0]


def _tuple(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part


@pytest.mark.parametrize("as_references", [False, True])
def test_types_that_torch_lacks_are_bytes_with_numpys_description(
    tmp_path: Path, as_references: bool
) -> None:
    checkpoint.save({**LACKING, "plain": np.arange(3)}, tmp_path / "step")
    group = checkpoint.open_zarr(tmp_path / "step")
    if as_references:
        checkpoint.write_references(tmp_path / "step", tmp_path / "references.json")
        files = fsspec.filesystem(
            "reference", fo=str(tmp_path / "references.json"), asynchronous=True
        )
        group = zarr.open_group(FsspecStore(files, read_only=True), mode="r", zarr_format=3)
    for name, expected in LACKING.items():
        found = array(group, name)
        assert str(found.dtype) == "uint8", name
        restored = as_it_was(found, found.attrs["dtype"])
        assert restored.dtype == expected.dtype, name
        assert restored.tobytes() == expected.tobytes(), name
    assert dict(group["plain"].attrs) == {}


def test_nothing_can_be_written(path: Path) -> None:
    group = checkpoint.open_zarr(path)
    with pytest.raises(ValueError, match="read-only"):
        array(group, "model/base")[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        group.create_group("more")


def test_damage_is_refused_when_it_is_read_and_not_before(path: Path) -> None:
    for file in path.parent.glob("ssd*/*/*.safetensors"):
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(b"damaged")
    group = checkpoint.open_zarr(path)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC"):
        array(group, "model/h/0/weight")[0]
    assert raw(array(group, "flag")) == b"\1"
    array(checkpoint.open_zarr(path, verify=False), "model/h/0/weight")[0]


def test_an_open_group_outlives_another_save(path: Path, state: dict[str, Any]) -> None:
    group = checkpoint.open_zarr(path)
    checkpoint.save({"x": 1}, path)
    assert raw(group["model/base"]) == bits(state["model"]["base"])


def test_the_store_travels_to_other_processes(path: Path, state: dict[str, Any]) -> None:
    blobs = checkpoint.open_zarr(path).store.blobs  # type: ignore[attr-defined]
    function, arguments = blobs.__reduce__()
    again = function(*arguments)
    assert again == blobs
    assert sorted(again) == sorted(blobs)
    key = "model/base/c/0/0"
    assert again[key].read(0, 400) == bits(state["model"]["base"])[:400]


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "model/base/c/9/9",
        "model/base/c/0",
        "model/base/c/00/0",
        "x/c/0",
        "flag/c/0",
        pytest.param(f"model/base/c/0/{'9' * 5000}", id="long"),
    ],
)
def test_keys_that_are_not_there_are_not_there(path: Path, key: str) -> None:
    assert key not in checkpoint.open_zarr(path).store.blobs  # type: ignore[attr-defined]


def test_zarr_reads_through_a_reference_file_without_this_library(
    path: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    file = checkpoint.write_references(path, tmp_path / "references.json")
    files = fsspec.filesystem("reference", fo=str(file), asynchronous=True)
    group = zarr.open_group(FsspecStore(files, read_only=True, path=""), mode="r")
    for place, keys in EXPECTED.items():
        if place != "model/columns":
            assert raw(group[place]) == bits(leaf(state, keys)), place
    references = json.loads(file.read_text())["refs"]
    inline = [key for key, value in references.items() if str(value).startswith("base64:")]
    assert len(inline) <= 2 * len(EXPECTED), "whole chunks are left where they are"


def test_names_become_paths_that_zarr_accepts() -> None:
    names = ["a", "a.b", "a.b.c", "x.y", "x/y", "", "..", "__z.q", "zarr.json", "50%", "x\\y"]
    paths = node_paths(names)
    assert len(set(paths.values())) == len(names)
    assert paths["a.b"] == "a.b"
    assert paths["x.y"] == "x/y"
    assert paths["x/y"] == "x%2Fy"
    assert paths["x\\y"] == "x%5Cy"
    arrays = set(paths.values())
    for place in arrays:
        levels = place.split("/")
        assert all(level and not level.startswith("__") and level.strip(".") for level in levels)
        assert not arrays & {"/".join(levels[:end]) for end in range(1, len(levels))}


@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 1, 9_000_000), (3, 2_000_000), (7, 0, 3)])
def test_chunks_tile_the_array_without_gaps(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.complex32, torch.bfloat16):
        layout = array_layout(dtype, shape)
        ranges = sorted(
            layout.chunk_range(index) for index in np.ndindex(*layout.grid) if all(layout.shape)
        )
        reached = 0
        for first, nbytes in ranges:
            assert first == reached
            assert 0 < nbytes <= layout.chunk_nbytes <= 4 << 20
            reached += nbytes
        assert reached == torch.Size(shape).numel() * BY_TORCH[dtype].itemsize


def test_a_store_that_travels_does_not_become_another_save(path: Path) -> None:
    store = pickle.dumps(checkpoint.open_zarr(path).store)
    checkpoint.save({"model": {"base": torch.zeros(3)}}, path)
    with pytest.raises(FileNotFoundError, match="replaced by"):
        pickle.loads(store)


def test_a_file_that_took_the_place_of_another_is_not_opened(path: Path, tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(3)}, tmp_path / "one")
    checkpoint.save({"x": torch.ones(3)}, tmp_path / "other")
    (mine,) = (tmp_path / "one").glob("*/*.safetensors")
    (theirs,) = (tmp_path / "other").glob("*/*.safetensors")
    theirs.replace(mine)
    for verify in (True, False):
        with pytest.raises(checkpoint.CorruptCheckpointError, match="not the file that was saved"):
            checkpoint.open_zarr(tmp_path / "one", verify=verify)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="not the file that was saved"):
        checkpoint.export_safetensors(tmp_path / "one", tmp_path / "exported")


def test_leaves_below_what_is_called_as_chunks_are_keep_their_values(tmp_path: Path) -> None:
    tensors = {
        "model": {key: torch.arange(1, 7) for key in ("c", "w")},
        "c": {"c": {"c": torch.tensor(1.5), "d": torch.tensor(2.5)}, "0": torch.tensor(3.5)},
        "x": {"c": torch.tensor(4.5), "rows": {"c": torch.full((3, 2), 6.5)}},
    }
    checkpoint.save(tensors, tmp_path / "step")
    group = checkpoint.open_zarr(tmp_path / "step")
    for name in checkpoint.list_tensors(tmp_path / "step"):
        place = name.replace(".", "/")
        assert raw(group[place]) == bits(leaf(tensors, tuple(name.split(".")))), place


def test_every_key_that_is_listed_is_there(tmp_path: Path) -> None:
    names = ("c", "c.c", "c.0", "0.c", "a/c/b", "c/", "%2F", "c.zarr.json")
    tensors: dict[str, Any] = {}
    for at, name in enumerate(names):
        tensors[f"{name}.x"] = torch.full((2,) * (at % 3), at + 1)
        tensors[f"{name}.c"] = torch.full((2,) * ((at + 1) % 3), at + 1)
    checkpoint.save(tensors, tmp_path / "step")
    blobs = CheckpointBlobs(tmp_path / "step")
    for key in blobs:
        if not key.endswith("zarr.json"):
            assert any(blobs[key].read(0, blobs[key].nbytes)), key


def test_chunks_of_an_array_are_counted_without_memory_for_all_of_them() -> None:
    empty = array_layout(torch.float32, (0, 1 << 50))
    assert list(empty.chunk_indices()) == []
    large = array_layout(torch.uint8, (3, 1 << 60))
    indices = large.chunk_indices()
    assert [next(indices), next(indices)] == [(0, 0), (0, 1)]
    small = array_layout(torch.uint8, (2, 3 << 20))
    assert list(small.chunk_indices()) == list(np.ndindex(*small.grid))


def test_an_empty_array_of_any_width_is_listed(tmp_path: Path) -> None:
    checkpoint.save({"e": torch.empty(0, 1 << 50), "w": torch.ones(2)}, tmp_path / "step")
    checkpoint.write_references(tmp_path / "step", tmp_path / "references.json")
    assert {name for name, _ in checkpoint.open_zarr(tmp_path / "step").members()} == {"e", "w"}
