"""What ranks compare of the options of their optimizers."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import OrderedDict, UserList, deque
from collections.abc import Collection, Mapping, Set, ValuesView
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from checkpoint.format.checksum import crc32c

_FEW = 64
"""Elements of a tensor of which all digits are told, and not a checksum."""
_SHOWN = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    | {torch.complex64, torch.complex128}
)
"""Dtypes of which torch gives the values as numbers; not every torch has all of the others."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def told(value: object, within: tuple[int, ...] = ()) -> str:
    """What ranks compare of an option: all of a tensor, wherever it lies, and no address or order
    of a set or dictionary, which are those of a process.

    ``within``: the containers that it is in, by ``id``; one that is in itself is told once.
    """
    if isinstance(value, torch.Tensor):
        return _told_tensor(value)
    if isinstance(value, np.ndarray):
        return _told_array(value, within)
    if isinstance(value, str | bytes | bytearray):
        return repr(value)
    if id(value) in within:
        return "..."
    within = (*within, id(value))
    kind = type(value).__qualname__
    if isinstance(value, Mapping):
        pairs = [f"{told(key, within)}: {told(each, within)}" for key, each in value.items()]
        if not isinstance(value, OrderedDict):
            pairs.sort()
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple | Set):
        return _told_entries(value, within)
    if isinstance(value, deque | UserList | ValuesView):
        return f"{kind}({_told_entries([*value], within)})"
    if isinstance(value, functools.partial):
        return f"partial{told((value.func, value.args, value.keywords), within)}"
    fields = _fields(value)
    if fields is not None:
        each = ", ".join(f"{name}={told(entry, within)}" for name, entry in fields.items())
        return f"{kind}({each})"
    return _ADDRESS.sub("", repr(value))


def _told_entries(value: Collection[object], within: tuple[int, ...]) -> str:
    each = [told(entry, within) for entry in value]
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(each))}}}"
    return f"[{', '.join(each)}]" if isinstance(value, list) else f"({', '.join(each)})"


def _fields(value: object) -> Mapping[str, object] | None:
    """What the text of ``value`` would show by name."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    if not hasattr(type(value).__repr__, "__wrapped__"):  # it has a text of its own
        return None
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.repr}


def _told_tensor(tensor: torch.Tensor) -> str:
    tensor = tensor.detach()
    parts = _parts(tensor)
    if parts is not None:
        size = "" if tensor.is_nested else f", size={[*tensor.shape]}"
        return f"tensor({', '.join(map(_told_tensor, parts))}{size}, layout={tensor.layout})"
    if tensor.is_meta or tensor.layout != torch.strided:
        return repr(tensor)
    what = f"dtype={tensor.dtype}"
    is_shown = tensor.dtype in _SHOWN and 0 < tensor.numel() <= _FEW
    if is_shown or type(tensor) is not torch.Tensor:  # of whose memory nothing is known
        return f"tensor({tensor.tolist()}, {what})"
    return f"tensor({_sum_of(tensor)}, size={[*tensor.shape]}, {what})"


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """What a tensor consists of that has no strides."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.is_meta:
        return None
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _sum_of(tensor: torch.Tensor) -> str:
    plain: Any = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return _sum_of_bytes(plain.reshape(-1).view(torch.uint8).numpy())


def _sum_of_bytes(values: Any) -> str:
    return f"of the checksum {crc32c(values):08x}"


def _told_array(array: np.ndarray[Any, Any], within: tuple[int, ...]) -> str:
    if array.dtype.hasobject:
        return f"array({told(array.tolist(), (*within, id(array)))}, dtype={array.dtype})"
    if type(array) is not np.ndarray or 0 < array.size <= _FEW:
        return f"array({array.tolist()}, dtype={array.dtype})"
    values = _sum_of_bytes(np.frombuffer(array.tobytes(), np.uint8))
    return f"array({values}, size={[*array.shape]}, dtype={array.dtype})"
