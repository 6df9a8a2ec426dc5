"""Trees to load into that take nothing, or not what they say."""

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.format.names import natural_name
from checkpoint.loading import into as into_tree
from checkpoint.loading import saved_leaves
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


class Part:
    """A sink of a range of a tensor."""

    dtype = torch.float32

    def __init__(self, ranges: Any, shape: tuple[int, ...] = (4,)) -> None:
        self.ranges, self.shape = ranges, shape
        self.data = bytearray(16)

    def write(self, start: int, data: memoryview) -> None:
        self.data[start : start + len(data)] = data


@pytest.fixture
def step(tmp_path: Path) -> Path:
    checkpoint.save({"w": torch.ones(4), "step": 3}, tmp_path / "step")
    return tmp_path / "step"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("into", [{}, [], (), {"a": {}, "b": []}], ids=str)
def test_into_without_leaves_is_refused(step: Path, into: Any, strict: bool) -> None:
    with pytest.raises(ValueError, match=r"into has no leaf that is in the checkpoint.*'w'"):
        checkpoint.load(step, into=into, strict=strict)


@pytest.mark.parametrize("into", [{"q": 7}, {"a": {"b": "c"}}, [None]], ids=str)
def test_into_with_values_alone_that_the_checkpoint_lacks_is_refused(step: Path, into: Any) -> None:
    with pytest.raises(ValueError, match="into has no leaf that is in the checkpoint"):
        checkpoint.load(step, into=into, strict=False)


def test_into_with_one_leaf_of_any_kind_that_is_there_is_loaded(step: Path) -> None:
    assert checkpoint.load(step, into={"step": 0, "q": 7}, strict=False) == {"step": 3, "q": 7}
    into = {"w": torch.zeros(4), "gone": torch.zeros(2)}
    assert checkpoint.load(step, into=into, strict=False)["w"].sum() == 4


def test_patterns_that_need_not_match_leave_into_as_it_is(step: Path) -> None:
    assert checkpoint.load(step, only="x*", into={"q": 7}, strict=False) == {"q": 7}


def test_empty_checkpoint_is_loaded_into_an_empty_tree(tmp_path: Path) -> None:
    checkpoint.save({}, tmp_path / "step")
    assert checkpoint.load(tmp_path / "step", into={}) == {}


@pytest.mark.parametrize("ranges", [((2, 3),), ((-1, 2),), ((0, -1),), ((5, 0),)], ids=str)
def test_sink_of_a_range_beyond_its_tensor_is_refused_by_name(
    step: Path, ranges: Iterable[tuple[int, int]]
) -> None:
    with pytest.raises(ValueError, match=r"into\['w'\] has the range .* within its 4 elements"):
        checkpoint.load(step, into={"w": Part(ranges), "step": 0})


@pytest.mark.parametrize(
    "ranges",
    [(3,), 7, (("a", "b"),), ((1, 2, 3),), pytest.param(iter([(0, 4)]), id="iterator")],
    ids=str,
)
def test_sink_with_ranges_that_are_none_is_refused_by_name(step: Path, ranges: Any) -> None:
    with pytest.raises(ValueError, match=r"into\['w'\] has ranges=.* not pairs"):
        checkpoint.load(step, into={"w": Part(ranges), "step": 0})


def test_sink_of_ranges_within_its_tensor_gets_them(step: Path) -> None:
    sink = Part(((1, 2), (4, 0)))
    checkpoint.load(step, into={"w": sink, "step": 0})
    assert np.frombuffer(sink.data, np.float32)[1:3].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ranges", [((0, 1),), ((0, 1), (1, 0)), ((0, 0), (0, 1))], ids=str)
def test_sink_of_the_range_of_a_number_gets_it(
    tmp_path: Path, ranges: Iterable[tuple[int, int]]
) -> None:
    checkpoint.save({"w": torch.tensor(2.5)}, tmp_path / "step")
    sink = Part(ranges, shape=())
    checkpoint.load(tmp_path / "step", into={"w": sink})
    assert np.frombuffer(sink.data, np.float32)[0] == 2.5
    empty = Part(((0, 0), (1, 0)), shape=())
    checkpoint.load(tmp_path / "step", into={"w": empty})
    assert not any(empty.data)


@pytest.mark.parametrize("data", [b"", np.zeros((2, 0)), np.zeros((0, 3), np.int16)], ids=str)
def test_stream_takes_nothing_of_any_shape(tmp_path: Path, data: Any) -> None:
    with checkpoint.open_stream(tmp_path / "file", "wb") as stream:
        assert stream.write(data) == 0
        assert stream.write(b"abc") == 3
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize("empty", [{}, OrderedDict(), [], ()])
def test_what_is_empty_where_there_are_values_is_refused_and_not_left_empty(
    tmp_path: Path, empty: Any
) -> None:
    """An optimizer that has taken no step has an empty state, and would go on from none."""
    state = {"w": torch.ones(3), "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "no": []}}
    checkpoint.save(state, tmp_path / "one")
    into: dict[str, Any] = {"w": torch.zeros(3), "optimizer": {"state": empty, "no": []}}
    refused = r"into\['optimizer'\]\['state'\] is empty.* 'optimizer.state.0.exp_avg'.*strict=False"
    every: list[dict[str, Any]] = [{}, {"only": "*"}, {"only": ["w", "optimizer.*"]}]
    for options in every:
        with pytest.raises(ValueError, match=refused):
            checkpoint.load(tmp_path / "one", into=into, **options)
    assert not into["w"].any()
    every = [{"strict": False}, {"only": "w"}]
    for options in every:
        loaded = checkpoint.load(tmp_path / "one", into=into, **options)
        assert loaded is into
        assert into["optimizer"] == {"state": empty, "no": []}
        assert into["w"].all()
        into["w"].zero_()


def test_a_list_that_is_empty_where_there_are_values_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(3), "losses": [0.5, 0.25]}, tmp_path / "one")
    with pytest.raises(ValueError, match=r"into\['losses'\] is empty.* 'losses.0'"):
        checkpoint.load(tmp_path / "one", into={"w": torch.zeros(3), "losses": []})
    with pytest.raises(ValueError, match=r"into\['w'\] is empty.* 'w'"):
        checkpoint.load(tmp_path / "one", into={"w": {}, "losses": [0.0, 0.0]})


def test_what_is_empty_beside_a_key_with_a_dot_is_no_place_for_that(tmp_path: Path) -> None:
    checkpoint.save({"a": {}, "a.b": torch.ones(3)}, tmp_path / "one")
    into = {"a": {}, "a.b": torch.zeros(3)}
    assert checkpoint.load(tmp_path / "one", into=into)["a.b"].sum() == 3


@pytest.mark.parametrize(
    ("saved", "into", "names"),
    [
        ({"o.state.0.m": torch.ones(3)}, {"o": {"state": {}}}, "'state'.* 'o.state.0.m'"),
        ({"o": {0: {"step": 7}}}, {"o": {"0": {}}}, "'0'.* 'o.0.step'"),
        ({"a": {"b": {"c": torch.ones(3)}}}, {"a.b": {}}, "'a.b'.* 'a.b.c'"),
        ({"a.b": torch.ones(3)}, {"a": {"b": {}}}, "'a'.*'b'.* 'a.b'"),
        ({"o.step": 7}, {"o": {"step": []}}, "'o'.*'step'.* 'o.step'"),
    ],
)
def test_what_is_empty_is_refused_where_the_checkpoint_has_leaves_by_name(
    tmp_path: Path, saved: dict[str, object], into: dict[str, object], names: str
) -> None:
    checkpoint.save({"w": torch.ones(3), **saved}, tmp_path / "one")
    live = {"w": torch.zeros(3), **into}
    with pytest.raises(ValueError, match=rf"into\[.*{names}, would not be loaded"):
        checkpoint.load(tmp_path / "one", into=live)
    assert not live["w"].any(), "nothing is written before everything fits"  # type: ignore[attr-defined]
    checkpoint.load(tmp_path / "one", into=live, strict=False)
    assert live["w"].all()  # type: ignore[attr-defined]


def test_what_is_empty_in_both_is_no_place_for_a_key_with_a_dot_that_is_not_asked_for(
    tmp_path: Path,
) -> None:
    checkpoint.save({"a": {}, "a.b": torch.ones(3), "w": torch.ones(3)}, tmp_path / "one")
    for into in ({"a": {}, "w": torch.zeros(3)}, {"a": {}, "a.b": torch.zeros(3)}):
        assert checkpoint.load(tmp_path / "one", into=into) is into


def test_many_that_are_empty_are_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights alone are loaded, beside the state of an optimizer that has none yet."""
    count = 300
    state = {"w": torch.ones(3), "state": {i: {"step": i} for i in range(count)}}
    checkpoint.save(state, tmp_path / "one")
    weight = torch.zeros(3)
    into = {"w": weight, "state": {i: dict[str, int]() for i in range(count)}}
    named = 0

    def counted(path: tuple[object, ...]) -> str:
        nonlocal named
        named += 1
        return natural_name(path)

    monkeypatch.setattr(saved_leaves, "natural_name", counted)
    checkpoint.load(tmp_path / "one", into=into, only="w")
    assert weight.all()
    assert named < 20 * count


def test_plain_values_are_not_asked_whether_they_are_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million of them, and each answer takes the time of a small tensor."""
    values = [True, 1, 2.5, 1j, "text", b"bytes", None]
    path = tmp_path / "plain"
    checkpoint.save({"w": torch.ones(4), "values": values}, path)
    asked = list[object]()

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            asked.append(value)
            return False

    monkeypatch.setattr(into_tree, "ByteSink", Kind("Sink", (), {}))
    into = {"w": torch.zeros(4), "values": [None] * len(values)}
    assert checkpoint.load(path, into=into)["values"] == values
    assert asked == []
