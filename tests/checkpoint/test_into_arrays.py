"""Loading into arrays of dtypes that torch lacks: bytes are stored, whose meaning must stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint

RECORD = [("a", "i4"), ("b", "f4")]

OTHER_MEANINGS: list[tuple[Any, Any]] = [
    (np.array(["2020-01-01", "2021-01-01"], "M8[D]"), np.zeros(2, "M8[ns]")),
    (np.array([(1, 2.0)], RECORD), np.zeros(1, [("b", "f4"), ("a", "i4")])),
    (np.array([1.0, 2.0], ">f8"), np.zeros(2, "M8[s]")),
    (np.array(["ab", "cd"]), np.zeros(2, "S8")),
    (np.array([1, 2], ">i4"), np.zeros(2, ">f4")),
    (np.array([1, 2], ">i4"), torch.zeros(2, 4, dtype=torch.uint8)),
    (np.zeros((2, 4), np.uint8), np.zeros(2, ">i4")),
    (torch.zeros(2, 4, dtype=torch.uint8), np.zeros(2, ">i4")),
]


@pytest.mark.parametrize(("saved", "live"), OTHER_MEANINGS, ids=range(len(OTHER_MEANINGS)))
def test_bytes_of_another_dtype_are_refused_and_nothing_is_written(
    tmp_path: Path, saved: Any, live: Any
) -> None:
    checkpoint.save({"x": saved}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"into\['x'\]"):
        checkpoint.load(tmp_path / "step", into={"x": live})
    assert not np.asarray(live).view(np.uint8).any()


@pytest.mark.parametrize(
    "saved",
    [
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([(1, 2.0)], RECORD),
        np.array([1.0, 2.0], ">f8"),
        np.array(["ab", "cd"]),
        np.array([1.5, 2.5], np.longdouble),
    ],
    ids=lambda array: array.dtype.str,
)
def test_the_same_dtype_is_loaded_into(tmp_path: Path, saved: np.ndarray[Any, Any]) -> None:
    checkpoint.save({"x": saved}, tmp_path / "step")
    live = np.zeros_like(saved)
    checkpoint.load(tmp_path / "step", into={"x": live})
    assert live.tobytes() == saved.tobytes()


def test_an_array_of_a_dtype_of_torch_is_loaded_into_a_tensor_and_back(tmp_path: Path) -> None:
    state = {"array": np.arange(3, dtype=np.float32), "tensor": torch.arange(3)}
    checkpoint.save(state, tmp_path / "step")
    tensor, array = torch.zeros(3), np.zeros(3, np.int64)
    checkpoint.load(tmp_path / "step", into={"array": tensor, "tensor": array})
    assert tensor.tolist() == array.tolist() == [0, 1, 2]
