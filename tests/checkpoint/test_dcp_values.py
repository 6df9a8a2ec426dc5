"""What is no tensor, through torch.distributed.checkpoint: groups, options, lists, own classes."""

from __future__ import annotations

import fractions
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from checkpoint.format.names import data_name, unique_names
from tests.checkpoint.trees import assert_same
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

VALUES: dict[str, Any] = {
    "lr": 1e-3,
    "count": 7,
    "huge": 1 << 80,
    "nan": float("inf"),
    "flag": True,
    "none": None,
    "name": "x",
    "raw": b"\x00\xff",
    "list": [1, 2.5, "x", None],
    "nested": [[1, 2], [3, [4]]],
    "tuple": (0.9, 0.999),
    "set": {1, 2},
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "numpy": np.float32(1.5),
    "array": np.arange(6).reshape(2, 3)[:, ::2],
    "records": np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "random": random.Random(3).getstate(),
    "empty list": [],
}


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp_save(state, storage_writer=checkpoint.dcp.StorageWriter(path), **options)


def load(live: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(path), **options)
    return live


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(state, 0)


def test_values_load_through_both_ways_as_they_were(tmp_path: Path) -> None:
    save({"v": VALUES, "t": torch.ones(2)}, tmp_path / "step")
    assert_same(VALUES, checkpoint.load(tmp_path / "step")["v"])
    live = load({"v": blank(VALUES), "t": torch.zeros(2)}, tmp_path / "step")
    assert_same(VALUES, live["v"])


ARRAYS = {
    "bytes": np.array([b"a", b"b", b"c"]),
    "byte": np.array(b"x"),
    "records of a byte": np.zeros(3, [("f", "u1")]),
    "no texts": np.array([], "<U2"),
    "no times": np.zeros((0, 3), "<M8[ns]"),
    "nothing big-endian": np.zeros((0, 2), ">f4"),
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "no item size": np.zeros((2, 3), "V0"),
    "empty": np.zeros((2, 0), np.float32),
    "one": np.ones((), np.int64),
}


@pytest.mark.parametrize("by_dcp", [True, False])
def test_arrays_keep_their_shapes(tmp_path: Path, by_dcp: bool) -> None:
    if by_dcp:
        save(dict(ARRAYS), tmp_path / "step")
    else:
        checkpoint.save(ARRAYS, tmp_path / "step")
    for name, array in load(blank(ARRAYS), tmp_path / "step").items():
        assert array.shape == ARRAYS[name].shape, name
        assert array.tolist() == ARRAYS[name].tolist(), name


BYTES = {
    "row": np.array([b"\x01", b"\x02", b"\x80"]).view("V1"),
    "table": np.zeros((2, 3), "V1"),
    "none": np.zeros(0, "V1"),
    "one": np.zeros((), "V1"),
}


@pytest.mark.parametrize("by_dcp", [True, False])
def test_arrays_of_the_dtype_that_dcps_bytes_have_load_as_arrays(
    tmp_path: Path, by_dcp: bool
) -> None:
    if by_dcp:
        save(dict(BYTES), tmp_path / "step")
    else:
        checkpoint.save(BYTES, tmp_path / "step")
    assert_same(BYTES, load(blank(BYTES), tmp_path / "step"))


def test_what_dcp_made_of_a_value_loads_from_a_copy_of_the_checkpoint(tmp_path: Path) -> None:
    save({"own": fractions.Fraction(1, 3)}, tmp_path / "step")
    checkpoint.save(checkpoint.load(tmp_path / "step"), tmp_path / "copy")
    assert load({"own": 0}, tmp_path / "copy") == {"own": fractions.Fraction(1, 3)}


def test_bytes_of_a_planner_of_its_own_come_back_to_it(tmp_path: Path) -> None:
    class Saving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            return io.BytesIO(f"own:{value}".encode()) if value == 7 else value

    class Loading(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()

    save({"seven": 7}, tmp_path / "step", planner=Saving())
    live = load({"seven": 0}, tmp_path / "step", planner=Loading())
    assert live == {"seven": b"own:7"}


def test_empty_tensors_within_values_load(tmp_path: Path) -> None:
    empty = torch.zeros(0, 3, dtype=torch.float64)
    state = {"pair": (empty, 1), "t": torch.ones(2)}
    checkpoint.save(state, tmp_path / "step")
    live = load({"pair": 0, "t": torch.zeros(2)}, tmp_path / "step")
    assert_same(live, state)


def test_a_value_that_no_tree_holds_stays_what_dcp_made_of_it(tmp_path: Path) -> None:
    state = {"own": fractions.Fraction(1, 3), "pair": (torch.ones(2), 1), "t": torch.ones(2)}
    save(state, tmp_path / "step")
    live = load({"own": 0, "pair": 0, "t": torch.zeros(2)}, tmp_path / "step")
    assert live["own"] == fractions.Fraction(1, 3)
    assert live["pair"][0].sum() == 2
    assert checkpoint.load(tmp_path / "step")["own"].dtype == np.dtype("V1")


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    groups: Any = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [*model[2].parameters()]},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2 * (seed + 1), betas=(0.8, 0.9))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("flat", [False, True])
def test_the_recipe_of_the_tutorial_goes_on_bit_identically(tmp_path: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = model_and_optimizer(0)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer, options=options)
    save({"app": {"model": weights, "optim": state}}, tmp_path / "step")
    train(model, optimizer, 2)

    other, second = model_and_optimizer(5)
    weights, state = get_state_dict(other, second, options=options)
    live: Any = {"app": {"model": weights, "optim": state}}
    load(live, tmp_path / "step")
    set_state_dict(
        other,
        second,
        model_state_dict=live["app"]["model"],
        optim_state_dict=live["app"]["optim"],
        options=options,
    )
    assert [group["lr"] for group in second.param_groups] == [0.1, 1e-2]
    train(other, second, 2)
    assert_same(model.state_dict(), other.state_dict())
    groups = checkpoint.load(tmp_path / "step")["app"]["optim"]
    assert flat or groups["param_groups"][0]["betas"] == (0.8, 0.9)


def test_an_empty_dict_beside_a_list_is_no_missing_key(tmp_path: Path) -> None:
    state: Any = {
        "o": {"state": {}, "groups": [{"lr": 1.0, "params": [0, 1]}]},
        "l": [{}, torch.ones(2)],
    }
    save(state, tmp_path / "step")
    live: Any = {
        "o": {"state": {}, "groups": [{"lr": 0.0, "params": [0]}]},
        "l": [{}, torch.zeros(2)],
    }
    assert_same(state, load(live, tmp_path / "step"))
    assert_same(state["l"], checkpoint.load(tmp_path / "step")["l"])


@pytest.mark.parametrize("by_dcp", [True, False])
def test_everything_or_some_keys_load_without_a_tree_to_load_into(
    tmp_path: Path, by_dcp: bool
) -> None:
    state: Any = {
        "model": {"w": torch.ones(3), "b": torch.zeros(2)},
        "optim": {"groups": [{"lr": 1.0, "betas": (0.9, 0.99)}], "m": [torch.ones(1)]},
        "names": ["a", "b"],
        "step": 3,
    }
    if by_dcp:
        save(state, tmp_path / "step")
    else:
        checkpoint.save(state, tmp_path / "step")
    reader = checkpoint.dcp.StorageReader(tmp_path / "step")
    assert_same(state, _load_state_dict_from_keys(storage_reader=reader))
    part = _load_state_dict_from_keys({"model", "optim.groups"}, storage_reader=reader)
    expected = {"model": state["model"], "optim": {"groups": state["optim"]["groups"]}}
    assert_same(expected, part)


def test_any_part_can_be_asked_for_as_one_value(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "groups": [{"lr": 1.0}], "pair": (torch.ones(1), 2)}
    checkpoint.save(state, tmp_path / "step")
    live = load(
        {"model": 0, "groups": 0, "pair": 0},
        tmp_path / "step",
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert_same(state, live)


def test_what_was_saved_without_flattening_loads_without(tmp_path: Path) -> None:
    state = {"groups": [{"lr": 1.0, "names": ["x"]}], "own": {"f": fractions.Fraction(1, 3)}}
    save(state, tmp_path / "step", planner=DefaultSavePlanner(flatten_state_dict=False))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert load({"groups": 0, "own": 0}, tmp_path / "step", planner=planner) == state
    assert checkpoint.load(tmp_path / "step")["groups"] == state["groups"]


def test_a_name_that_two_leaves_share_finds_neither(tmp_path: Path) -> None:
    checkpoint.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "step")
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: a\.b"):
        load({"a": {"b": torch.zeros(1)}}, tmp_path / "step")


@pytest.mark.parametrize("name", ["__metadata__", "__pad__1", "~__pad__1", "~", "", "\udc80"])
@pytest.mark.parametrize("beside", ["state", "~~", "\\udc80"])
def test_names_that_data_files_keep_for_themselves_load(
    tmp_path: Path, name: str, beside: str
) -> None:
    state = {name: torch.ones(2), "v": {name: 1}, beside: torch.zeros(3)}
    save(state, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step")
    assert list(loaded) == list(state)
    assert loaded["v"] == {name: 1}
    assert checkpoint.verify(tmp_path / "step").ok
    live = load({name: torch.zeros(2), "v": {name: 0}, beside: torch.ones(3)}, tmp_path / "step")
    for found in (loaded, live):
        assert found[name].tolist() == [1, 1]
        assert found[beside].tolist() == [0, 0, 0]
    assert live["v"] == {name: 1}


@given(st.sets(st.text("~\\ud80\ud800\udc80", max_size=5), min_size=2))
@example({"escaped~\\ud800", "~escaped~\\ud800", "\ud800", "~escaped~\\\\ud800"})
@example({"", "~", "~~", "state"})
def test_no_two_entries_have_the_same_name_in_data_files(fqns: set[str]) -> None:
    fqns |= {f"~escaped~{fqn}" for fqn in fqns}
    names = [data_name(fqn) for fqn in fqns]
    assert len(set(names)) == len(fqns)
    assert unique_names(names) == names
    assert all(name and name.encode() for name in names)
