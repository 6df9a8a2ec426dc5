"""Any tree of any views: what is saved is equal however it is read, or it is refused untouched."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings

import checkpoint
from aio import Engine
from checkpoint.directory.locate import read_manifest
from checkpoint.format.slices import span_elements
from checkpoint.format.tree import data_nodes
from checkpoint.interop.zarr_layout import node_paths
from tests.checkpoint.trees import assert_same
from tests.checkpoint.views import Drawn, states_of_views, values
from tests.support.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

RAM = Path("/dev/shm")
EXAMPLES = 40  # each takes tenths of a second, and more of them find what 40 have not


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(lanes=1) as engine:
        yield engine


def leaves(tree: Any) -> list[Any]:
    """Tensors and arrays, in the order of the tree."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return [tree]
    if not isinstance(tree, dict | list | tuple):
        return []
    items = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in leaves(item)]


def raw(leaf: Any) -> bytes:
    """The row-major bytes of a leaf, what lies between the fields of records included."""
    if isinstance(leaf, torch.Tensor):
        return values(leaf)
    plain = leaf.dtype.fields is None
    return (leaf if plain else leaf.view(np.dtype((np.void, leaf.dtype.itemsize)))).tobytes()


def assert_equal(left: Any, right: Any) -> None:
    """Equal trees: types and plain values by `assert_same`, leaves by type, shape, dtype, bits."""
    ours, theirs = leaves(left), leaves(right)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert tuple(one.shape) == tuple(other.shape)
        assert raw(one) == raw(other)
        if isinstance(one, torch.Tensor):
            assert one.requires_grad == other.requires_grad
    assert_same(without_leaves(left), without_leaves(right))


def without_leaves(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor | np.ndarray):
        return "a leaf"
    if isinstance(tree, dict):
        return type(tree)((key, without_leaves(item)) for key, item in tree.items())
    return type(tree)(map(without_leaves, tree)) if type(tree) in (list, tuple) else tree


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in memory."""
    span = span_elements(tensor.shape, tensor.stride()) * tensor.element_size()
    return tensor.data_ptr(), tensor.data_ptr() + span


def assert_shares(state: Any, loaded: Any) -> None:
    """What were two objects are two; what read the same memory alike reads one memory again."""
    pairs = list(zip(leaves(state), leaves(loaded), strict=True))
    for before, after in pairs:
        for other, other_after in pairs:
            assert before is other or after is not other_after
            if isinstance(before, torch.Tensor) and isinstance(other, torch.Tensor):
                assert_same_place(before, other, after, other_after)


def assert_same_place(
    before: torch.Tensor, other: torch.Tensor, after: torch.Tensor, other_after: torch.Tensor
) -> None:
    alike = (before.is_conj(), before.is_neg()) == (other.is_conj(), other.is_neg())
    if before.is_conj() or before.is_neg():
        alike = alike and before.dtype == other.dtype
    if not (alike and before.numel() and other.numel()):
        return
    if before._is_zerotensor() or other._is_zerotensor():
        return
    if before.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return
    (low, high), (other_low, other_high) = extent(before), extent(other)
    if before.is_contiguous() and other.is_contiguous() and low < other_high and other_low < high:
        assert after.data_ptr() - other_after.data_ptr() == low - other_low


def fresh(tree: Any) -> Any:
    """A live tree of the same names, its values others."""
    if isinstance(tree, torch.Tensor):
        empty = torch.empty(tuple(reversed(tree.shape)), dtype=tree.dtype)
        live = empty.permute(tuple(reversed(range(tree.dim()))))
        return torch.nn.Parameter(live, False) if type(tree) is torch.nn.Parameter else live
    if isinstance(tree, np.ndarray):
        return np.zeros(tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return type(tree)((key, fresh(item)) for key, item in tree.items())
    return type(tree)(map(fresh, tree)) if type(tree) in (list, tuple) else None


def assert_others_agree(state: Any, path: Path) -> None:
    """zarr and safetensors' own reader see the bytes."""
    manifest = read_manifest(path)
    nodes = data_nodes(manifest.tree)
    expected = dict(zip(nodes, leaves(state), strict=True))
    group: Any = checkpoint.open_zarr(path)
    for name, place in node_paths(nodes).items():
        found, leaf = group[place][...], expected[name]
        if str(leaf.dtype).removeprefix("torch.") == "bool":
            continue  # zarr makes every byte that is not 0 a 1
        assert found.tobytes() == raw(leaf), name
    for file in path.glob("*/*.safetensors"):
        stored = dict(safetensors.deserialize(file.read_bytes()))
        for name, (_, node) in nodes.items():
            index = node.get("tensor", node.get("array"))
            if index is not None:
                entry = stored[manifest.tensors[index].name]
                assert bytes(entry["data"]) == raw(expected[name]), name


def assert_some_agree(some: list[Any], path: Path, engine: Engine) -> None:
    """What is loaded of a few leaves alone is what all of them are."""
    for step in (1, 2, 3):
        numbers = list(range(len(some)))[step - 1 :: step]
        if not numbers:
            continue
        names = [f"all.{number}" for number in numbers]
        few = [some[number] for number in numbers]
        loaded = checkpoint.load(path, only=names, engine=engine)["all"]
        assert_equal(few, loaded)
        assert_shares(few, loaded)
        live = {number: fresh(some[number]) for number in numbers}
        checkpoint.load(path, into={"all": live}, engine=engine)
        assert_equal_but_for_gradients(few, list(live.values()))


@settings(
    max_examples=examples(EXAMPLES),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(states_of_views())
def test_any_views_come_back_or_are_refused_untouched(engine: Engine, drawn: Drawn) -> None:
    state = drawn.state
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as folder:
        path = Path(folder) / "step"
        if not drawn.is_fine:
            with pytest.raises((TypeError, ValueError), match=r"state\['bad'\]\[1\]"):
                checkpoint.save(state, path, engine=engine)
            assert not path.exists()
            return
        checkpoint.save(state, path, engine=engine)
        loaded = checkpoint.load(path, engine=engine)
        assert_equal(state, loaded)
        assert_shares(state, loaded)
        assert checkpoint.verify(path, engine=engine).problems == ()
        live = fresh(state)
        assert checkpoint.load(path, into=live, engine=engine) is live
        assert_equal_but_for_gradients(state, live)
        assert_some_agree(state["all"], path, engine)
        assert_others_agree(state, path)


def assert_equal_but_for_gradients(state: Any, live: Any) -> None:
    for one, other in zip(leaves(state), leaves(live), strict=True):
        assert raw(one) == raw(other)
    assert_same(without_leaves(state), without_leaves(live))
