"""What is saved comes back: values, types, bits, strides, shared memory."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoint
from aio import Engine
from tests.checkpoint.trees import assert_same, bits, states
from tests.support.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")

RAM = Path("/dev/shm")  # syncs cost nothing there; other tests here use a disk


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(lanes=2) as engine:
        yield engine


def roundtrip(state: Any, path: Path, **options: Any) -> Any:
    checkpoint.save(state, path, **options)
    return checkpoint.load(path)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(state=states, num_stripes=st.integers(0, 2))
def test_any_tree_comes_back_equal(state: Any, num_stripes: int, engine: Engine) -> None:
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as folder:
        stripes = [Path(folder) / f"ssd{k}" for k in range(num_stripes)]
        for stripe in stripes:
            stripe.mkdir()
        path = Path(folder) / "step"
        checkpoint.save(state, path, stripes or None, engine)
        assert_same(state, checkpoint.load(path, engine=engine))
        assert checkpoint.verify(path, engine=engine).problems == ()


@pytest.mark.parametrize("num_stripes", [1, 2, 3])
def test_large_tensors_split_over_stripes_come_back(tmp_path: Path, num_stripes: int) -> None:
    stripes = [tmp_path / f"ssd{k}" for k in range(num_stripes)]
    for stripe in stripes:
        stripe.mkdir()
    state = {
        "big": torch.randn(5_000_001),
        "rows": torch.randn(300, 7, 4096).to(torch.bfloat16),
        "strided": torch.randn(3000, 2000).t(),
        "small": [torch.full((k,), float(k)) for k in range(50)],
        "array": np.random.default_rng(0).random((1500, 1001)),
        "odd": np.full((700_000,), b"abc", "S7")[::2],
    }
    info = checkpoint.save(state, tmp_path / "step", stripes)
    assert_same(state, checkpoint.load(tmp_path / "step"))
    sizes = [sum(f.stat().st_size for f in stripe.rglob("*.safetensors")) for stripe in stripes]
    assert sum(sizes) == info.file_nbytes
    assert max(sizes) - min(sizes) < 0.05 * sum(sizes)


def test_views_of_one_storage_share_it_again(tmp_path: Path) -> None:
    flat = torch.arange(1000.0)
    state = {
        "whole": flat[100:],
        "inside": flat[200:300],
        "strided": flat[200:300:3],
        "bytes": flat[104:108].view(torch.uint8),
        "apart": flat[:50],
        "turned": flat[100:].view(30, 30).t(),
    }
    loaded = roundtrip(state, tmp_path / "step")
    assert_same(state, loaded)
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
    loaded["whole"].zero_()
    assert loaded["strided"].abs().sum() == 0
    assert loaded["bytes"].sum() == 0
    assert bits(loaded["apart"]) == bits(flat[:50])


def test_interleaved_views_without_their_base_share_again(tmp_path: Path) -> None:
    flat = torch.arange(100)
    loaded = roundtrip([flat[::2], flat[1::2], flat[::2]], tmp_path / "step")
    assert_same([flat[::2], flat[1::2], flat[::2]], loaded)
    loaded[0].fill_(-1)
    assert loaded[2].sum() == -50
    assert bits(loaded[1]) == bits(flat[1::2])
    assert loaded[0].data_ptr() + 8 == loaded[1].data_ptr()


def test_shared_bytes_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(1000, 1000)
    tied = {"embed": weight, "head": weight.detach(), "again": weight, "half": weight[:500]}
    assert checkpoint.save(tied, tmp_path / "step").nbytes == weight.nbytes
    loaded = checkpoint.load(tmp_path / "step")
    assert loaded["embed"] is loaded["again"]
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()


def test_a_view_of_a_large_storage_saves_its_own_bytes_only(tmp_path: Path) -> None:
    row = torch.zeros(1000, 1000)[3]
    assert checkpoint.save({"row": row}, tmp_path / "step").nbytes == row.nbytes
    assert checkpoint.load(tmp_path / "step")["row"].untyped_storage().nbytes() == row.nbytes


def test_orders_of_dimensions_are_kept(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    loaded = roundtrip({"image": image, "turned": torch.randn(3, 4).t()}, tmp_path / "step")
    assert loaded["image"].stride() == image.stride()
    assert loaded["turned"].stride() == (1, 4)


def test_conjugate_and_negative_views_are_resolved(tmp_path: Path) -> None:
    base = torch.randn(5, dtype=torch.complex64)
    state = {"conj": base.conj(), "neg": base.conj().imag}
    loaded = roundtrip(state, tmp_path / "step")
    assert torch.equal(loaded["conj"], base.conj().resolve_conj())
    assert torch.equal(loaded["neg"], base.conj().imag.resolve_neg())


def test_state_dicts_keep_their_versions(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    loaded = roundtrip(model.state_dict(), tmp_path / "step")
    assert type(loaded) is OrderedDict
    assert vars(loaded) == vars(model.state_dict())
    model.load_state_dict(loaded)


def test_optimizer_states_come_back_with_their_integer_keys(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    loaded = roundtrip(optimizer.state_dict(), tmp_path / "step")
    assert_same(optimizer.state_dict(), loaded)
    optimizer.load_state_dict(loaded)


class Ramp:
    """A byte source larger than one would like in memory: element k is k."""

    dtype = torch.int64
    shape = (1500, 1024)

    def __init__(self) -> None:
        self.largest = 0

    def read(self, start: int, out: memoryview) -> None:
        self.largest = max(self.largest, len(out))
        first = start // 8
        out[:] = np.arange(first, first + len(out) // 8).astype(np.int64).tobytes()


class Collector:
    """A byte sink that keeps everything and counts how often each byte came."""

    dtype = torch.int64
    shape = (1500, 1024)

    def __init__(self) -> None:
        self.data = bytearray(1500 * 1024 * 8)
        self.times = np.zeros(len(self.data), np.uint8)

    def write(self, start: int, data: memoryview) -> None:
        self.data[start : start + len(data)] = data
        self.times[start : start + len(data)] += 1


def test_byte_sources_come_back_as_tensors_and_into_sinks(tmp_path: Path) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    source = Ramp()
    checkpoint.save({"x": source, "n": 3}, tmp_path / "step", stripes, staging_bytes=1 << 20)
    assert source.largest <= 1 << 20
    loaded = checkpoint.load(tmp_path / "step")
    assert torch.equal(loaded["x"], torch.arange(1500 * 1024).view(1500, 1024))
    sink = Collector()
    into = {"x": sink, "n": 0}
    assert checkpoint.load(tmp_path / "step", into=into, staging_bytes=1 << 20) is into
    assert sink.data == loaded["x"].numpy().tobytes()
    assert sink.times.tolist() == [1] * len(sink.times)
    assert into["n"] == 3


@pytest.mark.parametrize("text", ["", "a", "a\0", "\0", "\ud800", "\U0001f600"], ids=ascii)
def test_numpy_strings_come_back_with_what_ends_them(tmp_path: Path, text: str) -> None:
    state = [np.str_(text), np.bytes_(text.encode("utf-8", "surrogatepass")), {np.str_(text): 1}]
    assert_same(state, roundtrip(state, tmp_path / "step"))
    loaded = checkpoint.load(tmp_path / "step")
    assert loaded[0] == text
    assert len(loaded[0]) == len(text)
    assert bytes(loaded[1]) == text.encode("utf-8", "surrogatepass")


def test_zeros_without_memory_are_saved_as_zeros(tmp_path: Path) -> None:
    zeros = torch._efficientzerotensor(3, 500)
    state = {"zeros": zeros, "part": zeros[1:, 7:], "other": torch._efficientzerotensor(4)}
    checkpoint.save(state, tmp_path / "c")
    loaded = checkpoint.load(tmp_path / "c")
    assert {name: loaded[name].shape for name in state} == {n: t.shape for n, t in state.items()}
    assert not any(tensor.any() for tensor in loaded.values())
    loaded["zeros"].add_(1.0)
    assert not loaded["part"].any()
    with pytest.raises(ValueError, match=r"into\['zeros'\] has no plain memory to load into"):
        checkpoint.load(tmp_path / "c", into=state)
