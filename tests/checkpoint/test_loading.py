"""Loading a part, loading into what is there, loading elsewhere."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.tensors.boxes import check_target
from tests.checkpoint.trees import assert_same, bits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.randn(20, 30)
    state = {
        "model": OrderedDict([("h.0.weight", weight), ("h.0.bias", torch.ones(30))]),
        "head": weight[:10],
        "optimizer": {"state": {0: {"exp_avg": torch.randn(20, 30), "step": 3}}, "groups": [1, 2]},
        "list": [torch.zeros(2), torch.ones(2), "text"],
        "numbers": np.arange(6).reshape(2, 3),
        "dates": np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
        "step": 7,
        "empty": {},
    }
    checkpoint.save(state, tmp_path / "step")
    return tmp_path / "step"


def test_names_are_keys_joined_by_dots(path: Path) -> None:
    assert checkpoint.list_tensors(path) == [
        "model.h.0.weight",
        "model.h.0.bias",
        "head",
        "optimizer.state.0.exp_avg",
        "list.0",
        "list.1",
        "numbers",
        "dates",
    ]


def test_colliding_names_are_told_apart_everywhere(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b~2": torch.ones(2)}, 1: {"x": 0}}
    checkpoint.save(state, tmp_path / "step")
    assert checkpoint.list_tensors(tmp_path / "step") == ["a.b", "a.b~3", "a.b~2"]
    assert_same({"a": {"b": torch.ones(1)}}, checkpoint.load(tmp_path / "step", only="a.b~3"))
    # A live tree in another order still takes what its keys say.
    live = {"a": {"b": torch.zeros(1), "b~2": torch.zeros(2)}, "a.b": torch.ones(1)}
    checkpoint.load(tmp_path / "step", into=live)
    assert_same({"a": state["a"], "a.b": state["a.b"]}, live)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["model.*"], ["model"]),
        ("step", ["step"]),
        (["*.exp_avg", "list.[01]"], ["optimizer", "list"]),
        (["empty"], ["empty"]),
        (["*"], None),
    ],
)
def test_only_gives_the_tree_with_what_matched(
    path: Path, only: str | list[str], expected: list[str] | None
) -> None:
    whole = checkpoint.load(path)
    part = checkpoint.load(path, only=only)
    assert list(part) == (list(whole) if expected is None else expected)
    if "list" in part and only != ["*"]:
        assert_same(whole["list"][:2], part["list"])
        assert_same(
            {"state": {0: {"exp_avg": part["optimizer"]["state"][0]["exp_avg"]}}}, part["optimizer"]
        )


def test_only_reads_no_other_data(path: Path) -> None:
    (file,) = path.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    (bias,) = (t for t in _records(path) if t.name == "model.h.0.bias")
    kept = content[bias.chunks[0].offset : bias.chunks[0].offset + 120]
    header = bytes(content[:4096])
    content[:] = b"\xff" * len(content)
    content[:4096] = header
    content[bias.chunks[0].offset : bias.chunks[0].offset + 120] = kept
    file.write_bytes(content)
    assert checkpoint.load(path, only="*.bias")["model"]["h.0.bias"].sum() == 30


def _records(path: Path) -> Any:
    from checkpoint.directory.locate import read_manifest

    return read_manifest(path).tensors


class Part:
    """The second half of a row of bytes, as a partial sink."""

    dtype = torch.uint8

    def __init__(self, numel: int) -> None:
        self.shape = (numel,)
        self.values = torch.zeros(numel // 2, dtype=torch.uint8)
        self.ranges = ((numel // 2, numel // 2),)

    def write(self, start: int, data: memoryview) -> None:
        first = start - self.ranges[0][0]
        self.values[first : first + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))


def test_a_partial_sink_that_is_all_of_a_tree_reads_its_part_alone(tmp_path: Path) -> None:
    row = torch.randint(256, (2 * CRC_BLOCK_BYTES,), dtype=torch.uint8)
    checkpoint.save({"row": row}, tmp_path / "step")
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(CRC_BLOCK_BYTES // 2)
        opened.write(b"damage that nobody who reads the second half alone can see")
    part = Part(row.numel())
    checkpoint.load(tmp_path / "step", into={"row": part})
    assert torch.equal(part.values, row[CRC_BLOCK_BYTES:])


def test_a_pattern_that_matches_nothing_is_refused_with_a_hint(path: Path) -> None:
    with pytest.raises(ValueError, match=r"only='stepp' matches no name.*'step'"):
        checkpoint.load(path, only=["model.*", "stepp"])


def test_a_pattern_that_matches_nothing_of_into_says_so(path: Path) -> None:
    with pytest.raises(ValueError, match=r"only='head' matches no name in into"):
        checkpoint.load(path, only=["step", "head"], into={"step": 0})


def test_into_writes_live_tensors_in_place_and_replaces_values(path: Path) -> None:
    whole = checkpoint.load(path)
    weight = torch.nn.Parameter(torch.zeros(20, 30))
    live: dict[str, Any] = {
        "model": OrderedDict([("h.0.weight", weight), ("h.0.bias", torch.zeros(60)[::2])]),
        "head": torch.zeros(10, 30),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(30, 20).t(), "step": None}}},
        "list": (torch.zeros(2), torch.zeros(2), ""),
        "numbers": np.zeros((3, 2), int).T,
        "dates": np.zeros(4, "M8[D]")[::2],
        "step": 0,
    }
    tensors = [live["model"]["h.0.weight"], live["head"], live["numbers"], live["dates"]]
    loaded = checkpoint.load(path, into=live)
    assert loaded is live
    assert loaded["model"]["h.0.weight"] is tensors[0]
    assert bits(tensors[0]) == bits(whole["model"]["h.0.weight"])
    assert bits(live["model"]["h.0.bias"]) == bits(whole["model"]["h.0.bias"])
    assert bits(tensors[1]) == bits(whole["head"])
    assert bits(live["optimizer"]["state"][0]["exp_avg"]) == bits(
        whole["optimizer"]["state"][0]["exp_avg"]
    )
    assert live["optimizer"]["state"][0]["step"] == 3
    assert live["list"][2] == "text"
    assert type(live["list"]) is tuple
    assert np.array_equal(tensors[2], whole["numbers"])
    assert np.array_equal(tensors[3], whole["dates"])
    assert live["step"] == 7


def test_into_with_only_leaves_the_rest_alone(path: Path) -> None:
    live: dict[str, Any] = {
        "model": {"h.0.weight": torch.zeros(20, 30), "h.0.bias": torch.zeros(30)},
        "step": 0,
    }
    checkpoint.load(path, only=["model.h.0.bias"], into=live)
    assert live["step"] == 0
    assert not live["model"]["h.0.weight"].any()
    assert live["model"]["h.0.bias"].all()


MISFITS = [
    ({"step": torch.zeros(1)}, "into\\['step'\\] is a tensor, .* holds a plain value there; put"),
    ({"model": {"h.0.bias": 0}}, "is a plain value, the checkpoint holds a tensor there; put"),
    ({"stop": 1}, "into\\['stop'\\] is not in the checkpoint; it has 'step'"),
    ({"model": {"h.0.bias": torch.zeros(31)}}, "shape \\(31,\\).*shape \\(30,\\)"),
    ({"model": {"h.0.bias": torch.zeros(30, dtype=torch.float64)}}, "float64.*float32"),
    ({"model": {"h.0.bias": torch.zeros(1).expand(30)}}, "expanded"),
    ({"model": {"h.0.bias": torch.zeros(30, device="meta")}}, "no plain memory"),
    ({"numbers": np.zeros((2, 3), "i4")}, "int32.*int64"),
    ({"numbers": np.zeros((2, 3), int)[::-1]}, "runs backwards"),
    ({"numbers": np.broadcast_to(np.zeros(3, int), (2, 3))}, "read-only"),
]


@pytest.mark.parametrize(("into", "match"), MISFITS, ids=range(len(MISFITS)))
def test_a_live_tree_that_does_not_fit_is_refused_before_anything_is_written(
    path: Path, into: Any, match: str
) -> None:
    bystander = torch.zeros(2)
    with pytest.raises(ValueError, match=match):
        checkpoint.load(path, into={"list": [bystander, torch.zeros(2), ""], **into})
    assert not bystander.any()


def test_large_live_tensors_are_read_in_place_wherever_they_lie(tmp_path: Path) -> None:
    big = torch.randn(3_000_001)
    checkpoint.save({"x": big}, tmp_path / "step")
    memory = torch.zeros(3_100_000)
    for shift in (0, 1, 1023):
        live = memory[shift : shift + big.numel()]
        checkpoint.load(tmp_path / "step", into={"x": live})
        assert torch.equal(live, big)
        assert not memory[shift + big.numel() :].any()
        memory.zero_()


def test_a_load_during_saves_to_the_same_path_gives_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "step"
    checkpoint.save({"x": torch.full((1000,), 0), "n": 0}, path)

    def save_often() -> None:
        for seed in range(1, 15):
            checkpoint.save({"x": torch.full((1000,), seed), "n": seed}, path)

    thread = threading.Thread(target=save_often)
    thread.start()
    seen = []
    while thread.is_alive():
        loaded = checkpoint.load(path)
        assert (loaded["x"] == loaded["n"]).all()
        seen.append(loaded["n"])
    thread.join()
    assert seen == sorted(seen)


def test_too_little_staging_memory_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raise staging_bytes"):
        checkpoint.save({"x": torch.ones(5000)}, tmp_path / "step", staging_bytes=4096)
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("state", [{"x": torch.ones(3), "n": 1}, torch.ones(3), 7], ids=str)
def test_asking_for_nothing_is_an_error(tmp_path: Path, state: Any) -> None:
    checkpoint.save(state, tmp_path / "step")
    for options in ({}, {"into": state}):
        with pytest.raises(ValueError, match=r"only=\[\] asks for nothing"):
            checkpoint.load(tmp_path / "step", only=[], **options)


def test_a_live_tensor_without_its_memory_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(1000)}, tmp_path / "step")
    live = torch.zeros(1000)
    live.untyped_storage().resize_(100)
    with pytest.raises(ValueError, match=r"into\['x'\].*its memory has been freed"):
        checkpoint.load(tmp_path / "step", into={"x": live})
    with pytest.raises(TypeError, match=r"x is a tensor .*its memory has been freed"):
        check_target(live, torch.float32, "x")


def test_live_tensors_that_overlap_themselves_are_refused_and_empty_ones_are_not(
    tmp_path: Path,
) -> None:
    state = {"x": torch.ones(3, 2), "empty": np.zeros((0, 2), ">f4"), "none": torch.zeros(0, 3)}
    checkpoint.save(state, tmp_path / "step")
    fine = {"empty": np.ones((0, 2), ">f4"), "none": torch.zeros(3).expand(0, 3)}
    assert checkpoint.load(tmp_path / "step", into=dict(fine)).keys() == fine.keys()
    for strides in [(0, 1), (1, 1)]:
        live = torch.zeros(6).as_strided((3, 2), strides)
        with pytest.raises(ValueError, match=r"into\['x'\].*share memory with each other"):
            checkpoint.load(tmp_path / "step", into={"x": live})


def test_negated_and_conjugated_live_tensors_take_the_saved_values(tmp_path: Path) -> None:
    x, z = torch.randn(6), torch.randn(6, dtype=torch.complex64)
    state = {"x": x, "part": x[1:4], "one": x[:1].as_strided((1,), (5,)), "z": z, "y": z[2:4]}
    checkpoint.save(state, tmp_path / "step")
    into = {
        **{name: torch._neg_view(torch.zeros(state[name].shape)) for name in ("x", "part", "one")},
        **{name: torch.zeros_like(state[name]).conj() for name in ("z", "y")},
    }
    checkpoint.load(tmp_path / "step", into=into)
    for name, value in state.items():
        assert torch.equal(into[name].resolve_neg().resolve_conj(), value), name
    impossible = {"x": torch._neg_view(torch.zeros(6, dtype=torch.float8_e5m2))}
    checkpoint.save({"x": torch.zeros(6, dtype=torch.float8_e5m2)}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"into\['x'\].*cannot write"):
        checkpoint.load(tmp_path / "step", into=impossible)


class Bytes:
    """A sink of one float."""

    dtype = torch.float32
    shape = (1,)

    def __init__(self) -> None:
        self.data = b""

    def write(self, start: int, data: memoryview) -> None:
        self.data += bytes(data)


def test_a_sink_takes_a_view_of_one_element(tmp_path: Path) -> None:
    x = torch.randn(6)
    state = {"x": x, "one": x.as_strided((1,), (2,), 3)}
    checkpoint.save(state, tmp_path / "step")
    sink = Bytes()
    checkpoint.load(tmp_path / "step", into={"one": sink})
    assert sink.data == x[3].numpy().tobytes()


def test_counters_come_back_as_they_were(tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([torch.zeros(1)], lr=1.0), [3, 5, 5]
    )
    state = {"schedule": schedule.state_dict(), "none": Counter[str]()}
    checkpoint.save(state, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step")
    assert loaded == state
    assert type(loaded["schedule"]["milestones"]) is type(loaded["none"]) is Counter
    into = {"schedule": dict(state["schedule"], milestones=Counter([1]))}
    assert checkpoint.load(tmp_path / "step", into=into, strict=False) == {
        "schedule": state["schedule"]
    }


def test_parts_of_a_counter_are_loaded_by_their_names(tmp_path: Path) -> None:
    checkpoint.save({"many": Counter([3, 5, 5])}, tmp_path / "step")
    some = checkpoint.load(tmp_path / "step", only="many.5")
    assert some == {"many": Counter([5, 5])}
    assert type(some["many"]) is Counter
    for name in ("many", "many.*"):
        assert checkpoint.load(tmp_path / "step", only=name) == {"many": Counter([3, 5, 5])}
    checkpoint.save(Counter([3]), tmp_path / "root")
    assert checkpoint.load(tmp_path / "root", only="x", strict=False) == Counter()


def test_a_counter_that_holds_itself_is_refused_as_such(tmp_path: Path) -> None:
    many: Any = Counter()
    many["again"] = many
    with pytest.raises(ValueError, match=r"state\['many'\]\['again'\]: the container holds itself"):
        checkpoint.save({"many": many}, tmp_path / "step")


def test_a_counter_of_tensors_is_refused_by_its_place(tmp_path: Path) -> None:
    many: Any = Counter()
    many["a"] = torch.ones(2)
    with pytest.raises(TypeError, match=r"state\['many'\]\['a'\]"):
        checkpoint.save({"many": many}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_arrays_are_in_host_memory_wherever_tensors_go(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "a": np.arange(4), "more": [np.ones(5), np.ones(5)]}
    checkpoint.save(state, tmp_path / "step")
    loaded = checkpoint.load(tmp_path / "step", map_location="meta")
    assert loaded["w"].is_meta
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert [array.tolist() for array in loaded["more"]] == [[1] * 5] * 2


def test_a_device_that_is_not_there_is_a_value_error(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(3)}, tmp_path / "step")
    for device in ("hpu", "xpu:3", "cuda:99"):
        with pytest.raises(ValueError, match="is no device of this machine"):
            checkpoint.load(tmp_path / "step", map_location=device)


def test_device_of_another_machine_is_a_value_error_that_names_the_remedy(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(3)}, tmp_path / "step")
    manifest = tmp_path / "step" / MANIFEST_NAME
    text = manifest.read_bytes().split(b"\n", 1)[1]
    text = text.replace(b'{"tensor":0}', b'{"tensor":0,"device":"cuda:99"}')
    assert b"cuda:99" in text
    digest = hashlib.sha256(text).hexdigest().encode()
    manifest.write_bytes(b'{"sha256":"' + digest + b'",\n' + text)
    with pytest.raises(ValueError, match=r"saved from cuda:99, .* give one as map_location="):
        checkpoint.load(tmp_path / "step", map_location=None)
    assert checkpoint.load(tmp_path / "step")["w"].sum() == 3
