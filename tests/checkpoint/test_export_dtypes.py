"""Exports hold every tensor as what stock safetensors reads back as the same, or say that they
cannot.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import checkpoint
from checkpoint.format.elements import BY_TORCH
from tests.checkpoint.trees import DTYPES
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

UNKNOWN_ARRAYS = {
    "big-endian": np.array([1.0, 2.0], ">f4"),
    "texts": np.array(["ab", "c"]),
    "times": np.array([1, 2], "M8[s]"),
    "long double": np.ones(2, np.longdouble),
    "records": np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "complex128": np.ones(2, np.complex128),
}


def filled(dtype: torch.dtype) -> torch.Tensor:
    count = 4 * 6 * dtype.itemsize
    raw = (torch.arange(count) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return raw.view(dtype).view(4, 6)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def is_in_stock(tensor: torch.Tensor, file: Path) -> bool:
    """Whether stock safetensors writes a tensor and reads it back as what it was."""
    try:
        save_file({"x": tensor}, file)
        return load_file(file)["x"].dtype == tensor.dtype
    except Exception:  # of many kinds
        return False


@pytest.mark.parametrize("way", ["tensors", "checkpoint"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_comes_back_as_it_was_or_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, way: str
) -> None:
    tensors = {"first": torch.ones(3), "one": filled(dtype), "rows": filled(dtype)[1:3]}

    def export() -> None:
        if way == "tensors":
            checkpoint.write_safetensors(tensors, tmp_path / "out")
        else:
            checkpoint.save(tensors, tmp_path / "step")
            checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out")

    if not is_in_stock(filled(dtype), tmp_path / "stock.safetensors"):
        with pytest.raises(TypeError, match=f"'one': safetensors has no tensors of {dtype}"):
            export()
        assert not (tmp_path / "out").exists()
        return
    export()
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert as_bytes(found[name]) == as_bytes(tensor), name


@pytest.mark.parametrize("way", ["tensors", "checkpoint"])
@pytest.mark.parametrize("kind", UNKNOWN_ARRAYS)
def test_array_that_safetensors_lacks_is_refused_by_name(
    tmp_path: Path, kind: str, way: str
) -> None:
    state: dict[str, Any] = {"plain": np.ones(2, np.float32), "odd": UNKNOWN_ARRAYS[kind]}
    checkpoint.save(state, tmp_path / "step")
    source: Any = state if way == "tensors" else tmp_path / "step"
    export: Any = (
        checkpoint.write_safetensors if way == "tensors" else checkpoint.export_safetensors
    )
    with pytest.raises(TypeError, match="'odd': safetensors has no"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_leaf_that_is_not_asked_for_keeps_no_export_from_being_made(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(2), "odd": UNKNOWN_ARRAYS["texts"]}, tmp_path / "step")
    (file,) = checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out", only="w")[:1]
    assert list(load_file(file)) == ["w"]


def test_source_of_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    class Source:
        dtype, shape = torch.complex128, (2,)

        def read(self, start: int, out: memoryview) -> None:
            raise AssertionError("nothing is read")

    with pytest.raises(TypeError, match=r"torch\.view_as_real"):
        checkpoint.write_safetensors({"x": Source()}, tmp_path / "out")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_number_of_four_bits_without_dimensions_is_refused(tmp_path: Path) -> None:
    pair = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0]
    with pytest.raises(TypeError, match="float4_e2m1fn_x2 without dimensions"):
        checkpoint.write_safetensors({"x": pair}, tmp_path / "out")


def test_data_files_hold_dtypes_by_codes_that_every_safetensors_reads() -> None:
    codes = {element.file_code for element in BY_TORCH.values()}
    assert codes <= {
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64"),
    }


def test_tensors_that_lie_apart_are_exported_under_a_mode_of_fake_tensors(tmp_path: Path) -> None:
    """Whose views of them have no values."""
    turned = torch.arange(6.0).view(2, 3).t()
    with FakeTensorMode(allow_non_fake_inputs=True):
        checkpoint.write_safetensors({"turned": turned}, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["turned"], turned)
