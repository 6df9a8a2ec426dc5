"""Keys that are not equal to themselves, and keys that cannot be keys any more when they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.tree import decode_tree
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

UNEQUAL = [
    float("nan"),
    complex(0, float("nan")),
    np.float32("nan"),
    np.datetime64("NaT"),
    (1, float("nan")),
]


@pytest.mark.parametrize("key", UNEQUAL, ids=repr)
@pytest.mark.parametrize("only", [None, "keep", "*.*"])
def test_a_key_that_is_not_equal_to_itself_loads(
    tmp_path: Path, key: object, only: str | None
) -> None:
    state = {"keep": torch.ones(2), "by": {key: torch.ones(3), "b": {key: 7}}}
    checkpoint.save(state, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step", only=only)
    if only != "*.*":
        assert torch.equal(loaded["keep"], torch.ones(2))
    if only != "keep":
        (found, value), (_, nested) = loaded["by"].items()
        assert repr(found) == repr(key)
        assert torch.equal(value, torch.ones(3))
        assert list(nested.values()) == [7]


@pytest.mark.parametrize("key", UNEQUAL, ids=repr)
def test_a_key_that_is_not_equal_to_itself_is_found_by_its_name(
    tmp_path: Path, key: object
) -> None:
    checkpoint.save({"by": {key: torch.ones(3), "b": {key: 7}}}, tmp_path / "step")
    live: dict[str, Any] = {"by": {key: torch.zeros(3), "b": {key: 0}}}
    checkpoint.load(tmp_path / "step", into=live)
    assert torch.equal(live["by"][key], torch.ones(3))
    assert live["by"]["b"] == {key: 7}


def test_several_keys_that_are_called_nan_are_refused_by_into(tmp_path: Path) -> None:
    def tree() -> dict[float, torch.Tensor]:
        return {float(text): torch.ones(1) for text in ("nan", "-nan")}

    checkpoint.save(tree(), tmp_path / "step")
    assert len(checkpoint.load(tmp_path / "step")) == 2
    with pytest.raises(ValueError, match=r"into\[nan\] could be several leaves"):
        checkpoint.load(tmp_path / "step", into=tree())


def record() -> Any:
    """Of a read-only array, and therefore hashable until it has been saved and loaded."""
    return np.frombuffer(bytes(8), "i4,i4")[0]


@pytest.mark.parametrize(
    "tree",
    [{"a": {record()}}, {"a": {(1, record())}}, {"a": {record(): 1}}],
    ids=["set", "tuple", "dict"],
)
def test_a_record_as_a_key_is_refused_with_its_place(tmp_path: Path, tree: object) -> None:
    with pytest.raises(TypeError, match=r"cannot save state\['a'\].*numpy.void"):
        checkpoint.save(tree, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_a_record_as_a_key_in_a_manifest_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="void cannot be a key"):
        decode_tree({"set": [{"numpy": ["|V3", "616263"]}]}, lambda _, node: node)


LONG = [10**5000, -(10**5000), (1, (10**5000,))]


@pytest.mark.parametrize("key", LONG, ids=["positive", "negative", "in tuples"])
def test_a_key_of_more_digits_than_python_writes_is_a_key_like_others(
    tmp_path: Path, key: Any
) -> None:
    checkpoint.save({key: torch.ones(3), "b": {key: 7}}, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step")
    assert torch.equal(loaded[key], torch.ones(3))
    assert loaded["b"][key] == 7
    live = {key: torch.zeros(3)}
    checkpoint.load(tmp_path / "step", into=live)
    assert torch.equal(live[key], torch.ones(3))
    (name,) = checkpoint.list_tensors(tmp_path / "step")
    assert list(checkpoint.load(tmp_path / "step", only=name)) == [key]
    with pytest.raises(TypeError, match=r"cannot save state\[.*0x.*: builtins.object is not"):
        checkpoint.save({key: object()}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"into\[.*0x.* is not in the checkpoint"):
        checkpoint.load(tmp_path / "step", into={"c": {key: torch.zeros(1)}})


def test_a_long_key_that_is_there_twice_is_damage() -> None:
    pair = [{"int": hex(10**5000)}, 1]
    with pytest.raises(CorruptCheckpointError, match=r"the key 0x.* is there twice"):
        decode_tree({"items": [pair, pair]}, lambda *_: None)
