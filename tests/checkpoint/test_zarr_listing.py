"""Listings of checkpoints through zarr: folder by folder, whatever the number of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
import zarr

import checkpoint
from checkpoint.interop.zarr_layout import ArrayLayout
from checkpoint.interop.zarr_store import CheckpointBlobs, CheckpointStore, ReadOnlyStore
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def collect(keys: AsyncIterator[str], most: int = 1000) -> list[str]:
    async def first() -> list[str]:
        found = []
        async for key in keys:
            found.append(key)
            if len(found) == most:
                break
        return found

    return asyncio.run(first())


@pytest.fixture
def stored(tmp_path: Path) -> CheckpointBlobs:
    big = torch.zeros(3 << 20, 2)
    state = {
        "a": {"b": {"w": big, "c": torch.ones(3)}, "c": torch.tensor(1.0), "e": torch.ones(0, 4)},
        "c": {"c": {"0": torch.ones(2)}},
        "w": torch.ones(5, 5),
    }
    checkpoint.save(state, tmp_path / "step")
    return CheckpointBlobs(tmp_path / "step")


PREFIXES = [
    "",
    "a",
    "a/",
    "a/b/",
    "a/b/w/",
    "a/b/w",
    "a/b/w/c/",
    "a/b/w/c/1/",
    "a/b/w/c/9/",
    "a/c/",
]
PREFIXES += ["c/c/", "c/", "w/c/0/", "w/c/0/0/", "w/zarr.json/", "nothing/", "a/b/w/c/x/", "a/e/"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_listing_is_that_of_all_keys(stored: CheckpointBlobs, prefix: str) -> None:
    """As the plain store, which goes through every key, lists them."""
    plain, store = ReadOnlyStore(stored), CheckpointStore(stored)
    listings: list[Callable[[ReadOnlyStore], AsyncIterator[str]]] = [
        lambda of: of.list_dir(prefix),
        lambda of: of.list_prefix(prefix),
        lambda of: of.list(),
    ]
    for listing in listings:
        assert sorted(collect(listing(store))) == sorted(collect(listing(plain)))
    assert len(stored) == len([*stored])


def test_members_are_listed_without_going_through_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = torch.zeros(1)
    layers = {f"layers.{i}.{name}": one.expand(4096, 11008) for i in range(24) for name in "qkvo"}
    checkpoint.save({"one": one, "model": layers}, tmp_path / "step")
    group = checkpoint.open_zarr(tmp_path / "step")
    monkeypatch.setattr(ArrayLayout, "chunk_indices", None)
    nodes = dict(group.members(max_depth=None))
    assert len(nodes) == 1 + 1 + 1 + 24 + 24 * 4
    assert nodes["model/layers/23/o"].shape == (4096, 11008)  # type: ignore[union-attr]


def test_a_view_of_any_size_is_listed_with_its_chunks_one_by_one(tmp_path: Path) -> None:
    one = torch.zeros(1)
    checkpoint.save({"one": one, "e": one.expand(1 << 45)}, tmp_path / "step")
    group = checkpoint.open_zarr(tmp_path / "step")
    assert sorted(group.array_keys()) == ["e", "one"]
    store = CheckpointStore(CheckpointBlobs(tmp_path / "step"))
    assert len(collect(store.list(), most=10)) == 10
    assert collect(store.list_prefix("e/c/"), most=3) == ["e/c/0", "e/c/1", "e/c/2"]
    assert [*islice(store.checkpoint, 2)] == ["zarr.json", "one/zarr.json"]
    assert len(store.checkpoint) > 1 << 20


def test_groups_below_the_root_are_listed_through_references(
    stored: CheckpointBlobs, tmp_path: Path
) -> None:
    """Where zarr asks fsspec for what is in an inner folder, it finds nothing."""
    file = checkpoint.write_references(tmp_path / "step", tmp_path / "references.json")
    group = zarr.open_group("reference://", storage_options={"fo": str(file)}, mode="r")
    expected = dict(checkpoint.open_zarr(tmp_path / "step").members(max_depth=None))
    found = dict(group.members(max_depth=None))
    assert {name: type(node) for name, node in found.items()} == {
        name: type(node) for name, node in expected.items()
    }
    inner = group["a"]
    assert isinstance(inner, zarr.Group)
    assert set(inner.keys()) == {"b", "c", "e"}
    whole = group["a/b/w"]
    assert isinstance(whole, zarr.Array)
    assert whole.shape == (3 << 20, 2)
