"""The states that are saved: shapes of a made-up GPT, of equal tensors, or of a real model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.bench.conditions.units import format_size
from checkpoint.format.checksum import crc32c
from checkpoint.format.elements import BY_CODE

_NUM_LAYERS = 12
_ITEM_BYTES = 4
_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 8 << 20


class CheckError(RuntimeError):
    """What was loaded is not what was saved."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to make up. `dtype` and `shape` are torch's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Workload:
    """Which tensors a state consists of; `label` is for tables."""

    label: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def gpt_workload(nbytes: int) -> Workload:
    """fp32 tensors of `nbytes` together (rounded down to 4) as in a GPT of twelve layers.

    The hidden size is what fits; the rest, a few percent, is one tensor more.
    """
    hidden = math.isqrt(nbytes // (12 * _ITEM_BYTES * _NUM_LAYERS))
    hidden -= hidden % 64 if hidden > 64 else 0
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_NUM_LAYERS if hidden else 0):
        shapes |= {
            f"layers.{layer}.attention.qkv.weight": (3 * hidden, hidden),
            f"layers.{layer}.attention.out.weight": (hidden, hidden),
            f"layers.{layer}.mlp.up.weight": (4 * hidden, hidden),
            f"layers.{layer}.mlp.down.weight": (hidden, 4 * hidden),
            f"layers.{layer}.norm1.weight": (hidden,),
            f"layers.{layer}.norm2.weight": (hidden,),
        }
    left = nbytes // _ITEM_BYTES - sum(math.prod(shape) for shape in shapes.values())
    while left < 0:  # very small states have no room for the norms
        left += math.prod(shapes.popitem()[1])
    if left:
        shapes["embedding.weight"] = (left,)
    specs = [TensorSpec(name, torch.float32, shape) for name, shape in shapes.items()]
    return Workload(f"GPT of {_NUM_LAYERS} layers", tuple(specs))


def equal_workload(nbytes: int, tensor_bytes: int) -> Workload:
    """fp32 tensors of `tensor_bytes` each, as many as fit into `nbytes`."""
    count = max(nbytes // tensor_bytes, 1)
    shape = (tensor_bytes // _ITEM_BYTES,)
    specs = [TensorSpec(f"tensors.{k:06}", torch.float32, shape) for k in range(count)]
    return Workload(f"{count} x {format_size(tensor_bytes)}", tuple(specs))


def model_workload(path: Path) -> Workload:
    """The shapes and dtypes of a safetensors file, or of all of them in a folder.

    Only headers are read. Raises ValueError naming a file that is not one, FileNotFoundError.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"there is no *.safetensors file in {path}")
    specs: dict[str, TensorSpec] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name != "__metadata__" and not name.startswith("__pad__"):
                specs[name] = _spec(file, name, entry)
    tensors = tuple(spec for spec in specs.values() if spec.nbytes)
    if not tensors:
        raise ValueError(f"there are no tensors in {path}")
    return Workload(path.name, tensors)


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header has {length} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is no object")
    return header


def _spec(path: Path, name: str, entry: Any) -> TensorSpec:
    try:
        dtype, shape = BY_CODE[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot make a tensor like {name!r}: {error!r}") from error
    if any(size < 0 for size in shape):
        raise ValueError(f"{path}: cannot make a tensor like {name!r}: its shape is {shape}")
    return TensorSpec(name, dtype, shape)


class State:
    """A workload in memory, filled with bits that do not compress; it knows their checksums."""

    def __init__(self, workload: Workload, *, seed: int = 0) -> None:
        self.label = workload.label
        self.nbytes = workload.nbytes
        self._seed = seed
        self.tensors = {
            spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in workload.tensors
        }
        self.fill()
        self._crcs = {name: _crc(tensor) for name, tensor in self.tensors.items()}

    def fill(self) -> None:
        """Puts the values in, always the same ones."""
        random = np.random.Generator(np.random.SFC64(self._seed))
        for tensor in self.tensors.values():
            raw = byte_view(tensor)
            for first in range(0, len(raw), _PIECE_BYTES):
                piece = raw[first : first + _PIECE_BYTES]
                words = random.integers(0, 1 << 64, -(-len(piece) // 8), np.uint64)
                piece[:] = words.view(np.uint8)[: len(piece)]
            if tensor.dtype == torch.bool:
                raw &= 1

    def clear(self) -> None:
        """Forgets the values, so that a load must bring every one of them back."""
        for tensor in self.tensors.values():
            byte_view(tensor)[:] = 0

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckError naming the first tensor that differs from what `fill` put in."""
        for name, expected in self._crcs.items():
            if name not in tensors:
                raise CheckError(f"tensor {name!r} did not come back")
            found = _crc(tensors[name])
            if found != expected:
                raise CheckError(
                    f"tensor {name!r} came back with CRC-32C {found:08x}, not {expected:08x}"
                )


def byte_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor, of whichever dtype."""
    array: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def _crc(tensor: torch.Tensor) -> int:
    return crc32c(byte_view(tensor.contiguous()))
