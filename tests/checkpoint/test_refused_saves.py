"""What a save refuses before it makes anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.recfunctions import repack_fields

import checkpoint


class Source:
    dtype = torch.float32

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def read(self, start: int, out: memoryview) -> None:
        raise AssertionError("nothing is read of what is refused")


@pytest.mark.parametrize("shape", [(2.5,), 5, (-1,), "22"])
def test_a_byte_source_whose_shape_is_none_is_refused(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(TypeError, match=r"\['x'\]: a byte source of shape"):
        checkpoint.save({"x": Source(shape)}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_a_name_that_is_too_long_for_stripes_leaves_nothing(tmp_path: Path) -> None:
    stripes = [tmp_path / "a"]
    stripes[0].mkdir()
    with pytest.raises(OSError, match="at most 246 bytes") as raised:
        checkpoint.save({"x": torch.zeros(1)}, tmp_path / ("n" * 247), stripes)
    assert raised.value.errno == errno.ENAMETOOLONG
    assert list(tmp_path.iterdir()) == stripes
    checkpoint.save({"x": torch.zeros(1)}, tmp_path / ("n" * 246), stripes)


def test_one_directory_under_two_names_is_no_two_stripes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    stat = Path.stat

    def mounted(path: Path, **options: Any) -> os.stat_result:
        return stat(stripes[0] if path == stripes[1] else path, **options)

    monkeypatch.setattr(Path, "stat", mounted)
    with pytest.raises(ValueError, match="one directory by a mount"):
        checkpoint.save({"x": torch.zeros(1)}, tmp_path / "step", stripes)


def test_a_directory_that_goes_while_it_is_looked_at_is_not_taken_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may be removing what a failed save made."""
    path = tmp_path / "step"
    path.mkdir()
    exists = Path.exists

    def exists_no_more(self: Path) -> bool:
        found = exists(self)
        if self == path and found and not any(path.iterdir()):
            path.rmdir()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", exists_no_more)
        checkpoint.save({"x": 1}, path)
    assert checkpoint.load(path) == {"x": 1}


@pytest.mark.parametrize("ranges", [5, ((0.0, 3),), ((0, 1, 2),)])
def test_a_byte_source_whose_ranges_are_no_pairs_is_refused(tmp_path: Path, ranges: Any) -> None:
    source = Source((3,))
    source.ranges = ranges  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"\['x'\]: a byte source with ranges="):
        checkpoint.save({"x": source}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_a_tensor_of_a_quantized_dtype_without_a_scale_is_refused(tmp_path: Path) -> None:
    bare = torch.zeros(3, dtype=torch.uint8).view(torch.qint8)
    with pytest.raises(TypeError, match=r"\['x'\]: a tensor of torch.qint8 without a scale"):
        checkpoint.save({"x": bare}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("guarded", [True, False])
def test_staging_of_no_bytes_is_no_default(tmp_path: Path, guarded: bool) -> None:
    layer = torch.nn.Linear(2, 2)
    guard = torch.optim.SGD(layer.parameters(), lr=0.1) if guarded else None
    with pytest.raises(ValueError, match="0 bytes of staging memory"):
        checkpoint.save_async(
            layer.state_dict(), tmp_path / "step", guard=guard, staging_bytes=0
        ).result()


@pytest.mark.parametrize("leaf", [b"x" * 100, "," * 100], ids=["bytes", "text"])
def test_a_state_of_long_values_is_refused_with_what_to_do(
    tmp_path: Path, leaf: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "MAX_MANIFEST_BYTES" if isinstance(leaf, bytes) else "MAX_JSON_VALUES"
    monkeypatch.setattr(f"checkpoint.format.manifest.{name}", 90)
    with pytest.raises(ValueError, match="long lists, texts and bytes into arrays or tensors"):
        checkpoint.save({"x": leaf}, tmp_path / "step")


FIELDS = np.dtype([("a", "i1"), ("b", "i4"), ("c", "f8")])
ODD_FIELDS = {
    "out of order": np.zeros(2, FIELDS)[["c", "a"]],
    "overlapping": np.zeros(
        2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 8}
    ),
    "within": np.zeros(2, [("n", np.zeros(0, FIELDS)[["b", "a"]].dtype), ("x", "i1")]),
    "a scalar": np.zeros(1, FIELDS)[["c", "a"]][0],
}


@pytest.mark.parametrize("kind", ODD_FIELDS)
def test_fields_out_of_order_are_refused_by_their_path_with_what_helps(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(TypeError, match=r"\['deep'\]\['x'\].*repack_fields"):
        checkpoint.save({"deep": {"x": ODD_FIELDS[kind]}}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_fields_out_of_order_that_were_repacked_are_saved(tmp_path: Path) -> None:
    packed = repack_fields(ODD_FIELDS["out of order"])
    checkpoint.save({"x": packed}, tmp_path / "step")
    assert checkpoint.load(tmp_path / "step")["x"].dtype == packed.dtype
