"""The element types of tensors: torch's dtypes, their names in manifests and in data files.

A manifest calls a dtype what torch calls it ("bfloat16"). A data file calls it by safetensors' code
where every version of stock safetensors since 0.5 reads that code; other types travel as plain
integers or as pairs of floats of the same bytes, so that every data file stays readable everywhere.
An exported file has no manifest beside it: what has no code of its own is not exported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class ElementType:
    """One dtype. `file_suffix` is what a data file adds to the shape: (2,) for pairs."""

    name: str
    torch: torch.dtype
    itemsize: int
    file_code: str
    file_suffix: tuple[int, ...] = ()
    export_code: str | None = None
    """By which stock safetensors reads it back as this dtype; None if by none."""
    export_packed: int = 1
    """How many of what that code calls an element are in one of torch's."""


# Codes that stock safetensors reads back as the very dtype.
_NATIVE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_PAIR_CODES = {"complex32": "F16", "complex128": "F64"}
_LATER_CODES = {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Codes that safetensors 0.8 reads, and older ones refuse a file for. Data files do without: their
manifest knows the dtype."""
_PACKED = {"float4_e2m1fn_x2": 2}
_CARRIER_CODES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def _torch_dtypes() -> list[torch.dtype]:
    """Every dtype torch has, without aliases; quantized ones are not plain memory and left out."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = (dtype for dtype in found if not _name(dtype).startswith(("qint", "quint")))
    return sorted(plain, key=str)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _element_type(dtype: torch.dtype) -> ElementType:
    name, itemsize = _name(dtype), dtype.itemsize
    if name in _NATIVE_CODES:
        code = _NATIVE_CODES[name]
        return ElementType(name, dtype, itemsize, code, export_code=code)
    if name in _PAIR_CODES:
        return ElementType(name, dtype, itemsize, _PAIR_CODES[name], (2,))
    later, packed = _LATER_CODES.get(name), _PACKED.get(name, 1)
    carrier = _CARRIER_CODES[itemsize]
    return ElementType(name, dtype, itemsize, carrier, export_code=later, export_packed=packed)


BY_TORCH = {dtype: _element_type(dtype) for dtype in _torch_dtypes()}
BY_NAME = {element.name: element for element in BY_TORCH.values()}
BY_CODE = {code: BY_NAME[name].torch for name, code in _NATIVE_CODES.items()}
"""What safetensors files hold, by the codes in their headers."""

_NUMPY_NAMES = {
    np.dtype(name): name
    for name in (*_NATIVE_CODES, "complex128")
    if name != "bfloat16" and not name.startswith("float8")
}


def of_numpy(dtype: np.dtype) -> tuple[ElementType, tuple[int, ...]]:
    """Element type that carries a numpy dtype, and the dimensions to add: raw bytes if unknown."""
    if dtype in _NUMPY_NAMES and dtype.isnative:
        return BY_NAME[_NUMPY_NAMES[dtype]], ()
    return BY_NAME["uint8"], (dtype.itemsize,)
