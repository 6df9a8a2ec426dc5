"""Small values of a state tree as JSON nodes and back, each exactly, its type included.

Types are matched exactly: a subclass (an IntEnum, a str with methods) would not come back as what
it was. numpy's scalars keep dtype and bits.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Node = Any
"""A JSON value, as `json.loads` gives it."""

_JSON_INT_LIMIT = 1 << 63
_MAX_DESCR_DEPTH = 16
_NUMPY_KINDS = "biufcmMSUV"
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_CHARACTERS = ("utf-32-le", "surrogatepass")


def is_scalar(value: object) -> bool:
    """Whether `encode_scalar` takes this value."""
    return type(value) in _ENCODERS or isinstance(value, np.generic)


def is_key(value: object) -> bool:
    """Whether a value can be a key or an element of a set, of those that `is_scalar` takes: records
    of numpy come back writable, and what is writable is none.
    """
    return is_scalar(value) and not isinstance(value, np.void)


def encode_scalar(value: Any) -> Node:
    """JSON node of a value that `is_scalar` accepts.

    Raises TypeError for a numpy scalar whose dtype holds Python objects or cannot be described, and
    for text that JSON does not bring back.
    """
    encoder = _ENCODERS.get(type(value))
    return _encode_numpy(value) if encoder is None else encoder(value)


def decode_scalar(node: Node) -> Any:
    """The value of a node. Raises ValueError for one that `encode_scalar` does not make."""
    if isinstance(node, dict):
        tag, content = _only_item(node)
        if tag not in _DECODERS:
            raise ValueError(f"unknown tag {str(tag)[:40]!r}")
        return _DECODERS[tag](content)
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise ValueError(f"{type(node).__name__} where a plain value should be")


def scalar_tags() -> frozenset[str]:
    """Tags whose nodes `decode_scalar` understands."""
    return frozenset(_DECODERS)


def encode_dtype(dtype: np.dtype[Any]) -> Node:
    """A numpy dtype as the JSON form of numpy's own description of it.

    Raises TypeError for dtypes that hold Python objects or that a reader would not bring back.
    """
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject:
        raise TypeError(f"numpy dtype {dtype} does not hold plain bytes")
    try:
        descr = dtype.str if dtype.fields is None else np.lib.format.dtype_to_descr(dtype)
    except ValueError as error:
        raise TypeError(
            f"numpy dtype {str(dtype)[:200]} cannot be described, as its fields overlap or are not "
            "in the order of their offsets; save numpy.lib.recfunctions.repack_fields of it"
        ) from error
    try:
        node: Node = json.loads(json.dumps(descr))
        found = decode_dtype(node)
    except (ValueError, TypeError) as error:
        raise TypeError(f"numpy dtype {str(dtype)[:200]} cannot be described: {error}") from error
    if found != dtype:
        raise TypeError(f"numpy dtype {str(dtype)[:200]} has no description that brings it back")
    return node


def decode_dtype(node: Node) -> np.dtype[Any]:
    """The dtype of a description. Raises ValueError for what describes none."""
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_tuples(node, 0))
    except (TypeError, ValueError, SyntaxError, KeyError, IndexError, OverflowError) as error:
        raise ValueError("not the description of a numpy dtype") from error
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject:
        raise ValueError("a numpy dtype that does not hold plain bytes")
    return dtype


def _tuples(node: Node, depth: int) -> Any:
    """Brings back the tuples that JSON made lists: a list of fields, each a tuple."""
    if depth > _MAX_DESCR_DEPTH:
        raise ValueError("a numpy dtype nested too deep")
    if isinstance(node, str):
        return node
    if not isinstance(node, list):
        raise ValueError("not the description of a numpy dtype")
    if not all(isinstance(item, list) for item in node):
        raise ValueError("not a list of fields")
    return [_field(item, depth) for item in node]


def _field(item: list[Node], depth: int) -> tuple[Any, ...]:
    if len(item) not in (2, 3):
        raise ValueError("a field of a numpy dtype has two or three parts")
    title, form = item[0], _tuples(item[1], depth + 1)
    name = title if isinstance(title, str) else tuple(title)
    return (name, form) if len(item) == 2 else (name, form, tuple(item[2]))


def _encode_text(value: str) -> Node:
    if not value.isascii() and _SURROGATE_PAIR.search(value):
        raise TypeError(
            "text with both halves of a surrogate pair as characters of their own, which JSON "
            "makes one character; decode it from UTF-16"
        )
    return value


def _encode_int(value: int) -> Node:
    return value if -_JSON_INT_LIMIT <= value < _JSON_INT_LIMIT else {"int": hex(value)}


def _decode_int(content: Node) -> int:
    return int(_text(content), 16)


def _encode_float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": repr(value)}


def _decode_float(content: Node) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError("not one of nan, inf, -inf")
    return float(content)


def _decode_any_float(node: Node) -> float:
    value = decode_scalar(node)
    if type(value) is not float:
        raise ValueError("not a float")
    return value


def _encode_complex(value: complex) -> Node:
    return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}


def _decode_complex(content: Node) -> complex:
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("a complex number has two parts")
    return complex(_decode_any_float(content[0]), _decode_any_float(content[1]))


def _encode_bytes(value: bytes) -> Node:
    return {"bytes": base64.b64encode(value).decode("ascii")}


def _decode_bytes(content: Node) -> bytes:
    try:
        return base64.b64decode(_text(content), validate=True)
    except (binascii.Error, UnicodeError) as error:
        raise ValueError("not base64") from error


def _encode_numpy(value: np.generic) -> Node:
    # numpy gives the bytes of an array, in which an empty string has a character.
    if type(value) is np.str_:
        return {"numpy": [f"<U{len(value)}", value.encode(*_CHARACTERS).hex()]}
    if type(value) is np.bytes_:
        return {"numpy": [f"|S{len(value)}", bytes(value).hex()]}
    return {"numpy": [encode_dtype(value.dtype), value.tobytes().hex()]}


def _decode_numpy(content: Node) -> Any:
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("a numpy scalar has a dtype and bytes")
    dtype, data = decode_dtype(content[0]), bytes.fromhex(_text(content[1]))
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy scalar of {dtype.itemsize}")
    # An element of an array would lose the zeros at its end.
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.str[:2] == "<U":
        return np.str_(data.decode(*_CHARACTERS))
    array: np.ndarray[Any, Any] = np.zeros((), dtype)
    if data:
        array = np.frombuffer(data, dtype).reshape(())
    return array.copy()[()]


def _decode_torch_dtype(content: Node) -> torch.dtype:
    name = _text(content)
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name[:40]!r} in this torch")
    return dtype


def _decode_size(content: Node) -> torch.Size:
    if not isinstance(content, list) or not all(type(item) is int for item in content):
        raise ValueError("not a list of integers")
    if not all(-_JSON_INT_LIMIT <= item < _JSON_INT_LIMIT for item in content):
        raise ValueError("an integer beyond 64 bits")
    return torch.Size(content)


def _decode_device(content: Node) -> torch.device:
    try:
        return torch.device(_text(content))
    except RuntimeError as error:
        raise ValueError("not a device") from error


def _text(content: Node) -> str:
    if not isinstance(content, str):
        raise ValueError("not a string")
    return content


def _only_item(node: dict[str, Node]) -> tuple[str, Node]:
    if len(node) != 1:
        raise ValueError(f"{len(node)} keys where there should be one tag")
    return next(iter(node.items()))


def _same(value: Any) -> Node:
    return value


_ENCODERS: dict[type, Callable[[Any], Node]] = {
    type(None): _same,
    bool: _same,
    str: _encode_text,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.Size: lambda value: {"size": list(value)},
    torch.device: lambda value: {"device": str(value)},
}
_DECODERS: dict[str, Callable[[Node], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "bytes": _decode_bytes,
    "numpy": _decode_numpy,
    "dtype": _decode_torch_dtype,
    "size": _decode_size,
    "device": _decode_device,
}
