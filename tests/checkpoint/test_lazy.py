"""`checkpoint.open`: any index of any leaf gives what `load` gives there, verified, and no more."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import checkpoint
from checkpoint.loading.opened import OpenCheckpoint
from checkpoint.plan import state_plan

_BASE = torch.arange(6 * 10, dtype=torch.float32).reshape(6, 10)

STATE: dict[str, Any] = {
    "whole": _BASE,
    "transposed": _BASE.t(),
    "columns": _BASE[:, ::3],
    "bytes": torch.arange(30, dtype=torch.uint8).reshape(5, 3, 2),
    "half": torch.linspace(0, 1, 24, dtype=torch.bfloat16).reshape(4, 6),
    "conjugate": torch.complex(_BASE, -_BASE)[:3, :3].conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "nested": {"list": [torch.arange(5), torch.arange(7)]},
    "array": np.arange(12.0).reshape(3, 4),
    "swapped": np.arange(6, dtype=">f4"),
    "days": np.array(["2020-01-01", "2021-02-03"], "datetime64[D]"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lazy") / "step"
    checkpoint.save(STATE, path)
    return path


@pytest.fixture
def lazy(path: Path) -> Iterator[checkpoint.LazyCheckpoint]:
    with checkpoint.open(path) as opened:
        yield opened


def leaf(name: str) -> Any:
    value: Any = STATE
    for key in name.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        assert not found.requires_grad
    else:
        found, expected = np.asarray(found), np.asarray(expected)
        if not expected.ndim:  # numpy's scalars have the machine's order of bytes, arrays keep it
            found, expected = (
                value.astype(value.dtype.newbyteorder("=")) for value in (found, expected)
            )
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_lazy_checkpoint_names_its_tensors_with_shapes_and_dtypes(
    path: Path, lazy: checkpoint.LazyCheckpoint
) -> None:
    assert list(lazy) == checkpoint.list_tensors(path)
    assert len(lazy) == len(list(lazy))
    assert "nested.list.1" in lazy
    for name, handle in lazy.items():
        expected = leaf(name)
        assert handle.name == name
        assert handle.shape == tuple(expected.shape)
        assert handle.ndim == expected.ndim
        assert handle.dtype == expected.dtype
        assert handle.nbytes == expected.nbytes
        assert_same(handle[...], expected)
        assert_same(handle[()], expected[()])


@given(st.data())
def test_any_index_of_any_leaf_gives_what_the_tensor_gives(path: Path, data: st.DataObject) -> None:
    with checkpoint.open(path) as lazy:
        name = data.draw(st.sampled_from(sorted(lazy)))
        expected = leaf(name)
        index = data.draw(indices(expected.shape))
        assert_same(lazy[name][index], expected[index])


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Integers and slices for some dimensions from the left, and `...` with some from the right."""
    places = [
        st.one_of(
            st.slices(size).filter(lambda place: place.step is None or 0 < place.step < 2**31),
            *([st.integers(-size, size - 1)] if size else []),
        )
        for size in shape
    ]
    count = st.integers(0, len(places))
    left = count.flatmap(lambda cut: st.tuples(*places[:cut]))
    right = count.flatmap(lambda cut: st.tuples(st.just(...), *places[cut:]))
    return st.one_of(left, right)


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (6, IndexError, "6 is out of range for dimension 0 of 'whole', of size 6"),
        ((0, 0, 0), IndexError, "has 2 dimensions and is indexed by 3"),
        ((..., 0, ...), IndexError, "more than one"),
        (True, TypeError, "indexed by a bool"),
        ([0, 1], TypeError, "indexed by a list"),
        (torch.tensor(1), TypeError, "indexed by a Tensor"),
        (None, TypeError, "indexed by a NoneType"),
        (slice("a", None), TypeError, "whose ends are no integers"),
        (slice(None, None, -1), ValueError, "step above zero"),
        (slice(None, None, 0), ValueError, "step above zero"),
    ],
)
def test_an_index_that_is_not_one_is_refused_by_name(
    lazy: checkpoint.LazyCheckpoint, index: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lazy["whole"][index]


def test_a_name_that_is_not_there_is_refused_with_similar_ones(
    lazy: checkpoint.LazyCheckpoint,
) -> None:
    with pytest.raises(KeyError, match="there is 'transposed'"):
        lazy["transpose"]
    assert lazy.get("transpose") is None


def test_a_step_of_any_size_is_one(lazy: checkpoint.LazyCheckpoint) -> None:
    assert torch.equal(lazy["whole"][:: 1 << 70], STATE["whole"][:1])


@pytest.mark.parametrize("name", ["int4", "uint1", "bits8", "complex64"])
def test_a_step_through_what_torch_does_not_clone(tmp_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    values = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(4, 6)
    checkpoint.save({"w": values}, tmp_path / "step")
    with checkpoint.open(tmp_path / "step") as lazy:
        found = lazy["w"][1:, ::2]
    assert (found.dtype, found.shape) == (dtype, (3, 3))
    expected = values.view(torch.uint8).reshape(4, 6, -1)[1:, ::2]
    assert torch.equal(found.contiguous().view(torch.uint8).reshape(3, 3, -1), expected)


def test_an_open_checkpoint_is_itself_alone(path: Path, lazy: checkpoint.LazyCheckpoint) -> None:
    with checkpoint.open(path) as other:
        assert lazy == lazy
        assert lazy != other


def test_rows_are_gone_through_as_of_a_tensor(lazy: checkpoint.LazyCheckpoint) -> None:
    assert torch.equal(torch.stack(list(lazy["whole"])), STATE["whole"])
    with pytest.raises(TypeError, match="no dimension"):
        iter(lazy["scalar"])


def test_what_is_closed_refuses_to_read_and_keeps_what_was_read(path: Path) -> None:
    lazy = checkpoint.open(path)
    handle, rows = lazy["whole"], lazy["whole"][:2]
    lazy.close()
    lazy.close()
    with pytest.raises(ValueError, match="closed> cannot be read from; open it again"):
        handle[0]
    assert torch.equal(rows, STATE["whole"][:2])
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(lazy)


def test_an_open_checkpoint_stays_what_it_was_when_another_save_takes_its_place(
    tmp_path: Path,
) -> None:
    checkpoint.save({"w": torch.zeros(4)}, tmp_path / "step")
    with checkpoint.open(tmp_path / "step") as lazy:
        checkpoint.save({"w": torch.ones(4)}, tmp_path / "step")
        assert lazy["w"][...].sum() == 0
    with checkpoint.open(tmp_path / "step") as lazy:
        assert lazy["w"][...].sum() == 4


def test_damaged_bytes_are_never_seen_and_others_still_are(tmp_path: Path) -> None:
    info = checkpoint.save({"a": torch.ones(2048), "b": torch.ones(2048)}, tmp_path / "step")
    assert info.nbytes
    (file,) = (tmp_path / "step").glob("*/*.safetensors")
    with file.open("r+b") as data:
        data.seek(4096 + 17)
        data.write(b"\xff")
    with checkpoint.open(tmp_path / "step") as lazy:
        with pytest.raises(checkpoint.CorruptCheckpointError, match="tensor 'a'"):
            lazy["a"][1024:]
        assert lazy["b"][...].sum() == 2048
    with checkpoint.open(tmp_path / "step", verify=False) as lazy:
        assert lazy["a"][1024:].sum() == 1024


@pytest.mark.parametrize("has_grains", [False, True])
def test_a_slice_reads_the_checksum_blocks_or_grains_that_it_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_grains: bool
) -> None:
    weight = torch.arange(10 << 20, dtype=torch.float32).view(1 << 10, -1)  # 40 MiB: 3 blocks
    if not has_grains:
        monkeypatch.setattr(state_plan, "grain_bytes", lambda *_: 0)
    stripes = [tmp_path / "0", tmp_path / "1"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save({"w": weight}, tmp_path / "step", stripes)
    numbers: list[int] = []
    begin = OpenCheckpoint._begin

    def counting(*args: Any) -> Any:
        read = begin(*args)
        numbers.append(len(read.into))
        return read

    monkeypatch.setattr(OpenCheckpoint, "_begin", counting)
    row = weight[0].nbytes
    with checkpoint.open(tmp_path / "step") as lazy:
        assert torch.equal(lazy["w"][3:5, 7:], weight[3:5, 7:])
        assert sum(numbers) <= (2 * row if has_grains else 16 << 20)
        assert torch.equal(lazy["w"][4:5], weight[4:5])
        assert len(numbers) == 1, "what was read last is kept"
        assert torch.equal(lazy["w"][4:6], weight[4:6])
        assert sum(numbers) == (3 * row if has_grains else 16 << 20)
        assert torch.equal(lazy["w"][:, 100:200], weight[:, 100:200])
        assert sum(numbers) <= (3 * row + 1024 * 4096 if has_grains else weight.nbytes)
        assert torch.equal(lazy["w"][...], weight)


def test_several_threads_read_one_open_checkpoint(lazy: checkpoint.LazyCheckpoint) -> None:
    wrong: list[str] = []

    def read(names: list[str]) -> None:
        for name in names:
            found, expected = lazy[name][...], leaf(name)
            if not np.array_equal(found, expected):
                wrong.append(name)

    names = ["whole", "transposed", "columns", "bytes", "array"]
    threads = [threading.Thread(target=read, args=(names * 5,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_descriptor_is_left(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with checkpoint.open(path) as lazy:
        lazy["whole"][0]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(FileNotFoundError):
        checkpoint.open(path / "nowhere")


def test_an_index_under_a_mode_without_values_is_refused_by_name(
    lazy: checkpoint.LazyCheckpoint,
) -> None:
    name = next(iter(lazy))
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"{name}.*index it outside"):
        lazy[name][...]


def test_an_index_of_an_array_gives_an_array_also_of_one_element(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "none": np.array(3.5),
        "two": np.arange(6.0).reshape(2, 3),
        "text": np.array("ab"),
    }
    checkpoint.save(state, tmp_path / "step")
    with checkpoint.open(tmp_path / "step") as lazy:
        places: dict[str, Any] = {"none": (), "two": (1, 2), "text": ...}
        for name, index in places.items():
            found, expected = lazy[name][index], np.asarray(state[name][index])
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (expected.dtype, ())
            assert found == expected


def test_numpy_takes_all_of_one(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "matrix": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(2.5),
        "array": np.arange(5, dtype=">i2"),
    }
    checkpoint.save(state, tmp_path / "step")
    with checkpoint.open(tmp_path / "step") as lazy:
        for name, value in state.items():
            found = np.asarray(lazy[name])
            assert (found.dtype, found.shape) == (np.asarray(value).dtype, tuple(value.shape))
            assert np.array_equal(found, np.asarray(value))
            with pytest.raises(ValueError, match="not read yet"):
                np.array(lazy[name], copy=False)
        assert np.asarray(lazy["matrix"], dtype="i4").dtype == np.int32
        assert np.array_equal(np.array([lazy["array"]] * 2), np.array([state["array"]] * 2))
        assert np.array_equal(np.arange(9)[lazy["array"]], state["array"])
