"""Several leaves over one storage: what each holds comes back, and what can share shares again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from tests.checkpoint.trees import assert_same


def roundtrip(state: Any, path: Path) -> Any:
    checkpoint.save(state, path)
    loaded = checkpoint.load(path)
    assert checkpoint.verify(path).ok
    return loaded


def share(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all lie in one storage."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def complex_numbers(count: int = 6) -> torch.Tensor:
    return torch.randn(count, dtype=torch.complex64)


def test_a_conjugate_beside_its_base_keeps_its_values(tmp_path: Path) -> None:
    x = complex_numbers()
    state = {"x": x, "conj": x.conj(), "again": x.conj(), "part": x.conj()[2:], "same": x[1:]}
    loaded = roundtrip(state, tmp_path / "step")
    for name, value in state.items():
        assert torch.equal(loaded[name], value.resolve_conj()), name
    assert loaded["same"].data_ptr() == loaded["x"].data_ptr() + 8
    assert loaded["part"].data_ptr() == loaded["conj"].data_ptr() + 16


def test_a_negative_beside_its_base_keeps_its_values(tmp_path: Path) -> None:
    x = complex_numbers()
    y = torch.randn(5)
    state = {
        "x": x,
        "imag": x.conj().imag,
        "real": x.conj().real,
        "y": y,
        "negative": torch._neg_view(y),
        "integer": torch._neg_view(y.view(torch.int32)),
        "both": torch._neg_view(x.conj()),
    }
    loaded = roundtrip(state, tmp_path / "step")
    for name, value in state.items():
        assert torch.equal(loaded[name], value.resolve_conj().resolve_neg()), name


def test_a_view_that_lies_odd_in_its_base_comes_back(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    state = {"bytes": raw[1:33], "floats": raw[4:20].view(torch.float32), "one": raw[3:5]}
    loaded = roundtrip(state, tmp_path / "step")
    assert_same(state, loaded)
    assert loaded["floats"].data_ptr() == loaded["bytes"].data_ptr() + 3
    assert share(loaded.values())


@pytest.mark.parametrize("step", [0, 1], ids=["expanded", "windows"])
def test_a_tensor_that_overlaps_itself_comes_back_in_a_shared_storage(
    tmp_path: Path, step: int
) -> None:
    flat = torch.arange(12.0)
    x, y = flat[:4].as_strided((3, 2), (step, 1)), flat[6:].as_strided((3, 2), (step, 2))
    loaded = roundtrip({"x": x, "y": y}, tmp_path / "step")
    assert_same({"x": x, "y": y}, loaded)
    assert share(loaded.values())


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (7, 2), (1, 3), (2000, 1 << 19)], ids=str)
def test_two_tensors_of_one_geometry_come_back_as_one(
    tmp_path: Path, strides: tuple[int, int]
) -> None:
    flat = torch.randn(1 << 20)
    views = [flat.as_strided((3, 2), strides), flat.as_strided((3, 2), strides)]
    loaded = roundtrip(views, tmp_path / "alone")
    assert_same(views, loaded)
    assert loaded[0].data_ptr() == loaded[1].data_ptr()
    beside = [*views, flat.as_strided((3, 2), strides, 3), flat.view(torch.int32)[::400_000]]
    assert_same(beside, roundtrip(beside, tmp_path / "beside"))


def test_one_geometry_in_two_dtypes_keeps_both(tmp_path: Path) -> None:
    flat = torch.randn(30)
    state = [flat[::3], flat.view(torch.int32)[::3]]
    loaded = roundtrip(state, tmp_path / "step")
    assert_same(state, loaded)
    assert share(loaded)
