"""How the leaves of a checkpoint look as zarr arrays in nested groups: pure, without zarr.

Dots in names become levels of groups. A name that goes on where an array already is
(`a` and `a.b`) stays in one piece from there; what zarr has no node name for is percent-encoded.
Arrays are cut into chunks that are gapless in the row-major tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpoint.format.elements import BY_TORCH, ElementType, of_numpy
from checkpoint.format.scalars import Node, encode_dtype
from checkpoint.format.slices import Shape
from checkpoint.plan.striping import quantum_rows

_ZARR_TYPES = {
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """A zarr array: what a leaf's row-major bytes are as elements that zarr knows."""

    data_type: str
    itemsize: int
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: Node
    """What torch calls the elements, or how numpy describes those that torch lacks."""

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk_shape) * self.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dimension."""
        return tuple(
            -(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True)
        )

    def chunk_indices(self) -> Iterator[tuple[int, ...]]:
        """Every index into the grid, in row-major order, without memory for all of them: an empty
        array may have a dimension of any size.
        """
        grid = self.grid
        for flat in range(math.prod(grid)):
            index: list[int] = []
            for count in reversed(grid):
                flat, place = divmod(flat, count)
                index.append(place)
            yield tuple(reversed(index))

    def chunk_range(self, index: tuple[int, ...]) -> tuple[int, int]:
        """First byte of a chunk in the row-major array, and the bytes that it really has."""
        first, count = 0, 1
        for place, size, chunk in zip(index, self.shape, self.chunk_shape, strict=True):
            low = place * chunk
            first = first * size + low
            count *= min(chunk, size - low)
        return first * self.itemsize, count * self.itemsize

    def metadata(self) -> str:
        """The text of the array's zarr.json. `dtype` is an attribute where `data_type` is another
        one.
        """
        attributes = {} if self.data_type == self.dtype else {"dtype": self.dtype}
        document: dict[str, Any] = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _fill_value(self.data_type),
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": attributes,
        }
        return json.dumps(document)


def _fill_value(data_type: str) -> Any:
    if data_type == "bool":
        return False
    return [0.0, 0.0] if data_type.startswith("complex") else 0


_MOST_CHUNK_BYTES = 16 << 20
_LEAST_CHUNK_BYTES = 4096
"""Of what lies in a box: of smaller ones there are too many."""

_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
GROUP_METADATA = json.dumps(_GROUP)


def consolidated_metadata(below: Mapping[str, str]) -> str:
    """The text of the zarr.json of a root group, with those of all `below` it, by their paths."""
    inline = {path: json.loads(text) for path, text in below.items()}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": inline}
    return json.dumps({**_GROUP, "consolidated_metadata": consolidated})


def array_layout(
    dtype: Any, shape: tuple[int, ...], array: np.dtype[Any] | None = None
) -> ArrayLayout:
    """The zarr array for a tensor, or for an `array` of numpy of this dtype: types that zarr lacks
    become unsigned integers of their size, those that torch lacks the bytes that they are stored
    as, with a dimension more.
    """
    element: ElementType = BY_TORCH[dtype]
    name: Node = element.name
    if array is not None and of_numpy(array)[1]:
        name = encode_dtype(array)
    if element.name in _ZARR_TYPES:
        data_type, itemsize, full = element.name, element.itemsize, shape
    elif element.name == "complex32":
        data_type, itemsize, full = "float16", 2, (*shape, 2)
    else:
        data_type, itemsize, full = f"uint{8 * element.itemsize}", element.itemsize, shape
    return ArrayLayout(data_type, itemsize, full, _chunk_shape(full, itemsize), name)


def layout_in_boxes(
    layout: ArrayLayout, boxes: Sequence[tuple[Shape, Shape]]
) -> ArrayLayout | None:
    """The array with chunks that are gapless in each of the boxes (start, shape) that make it up.
    None where these would have to be smaller than a page, as in columns of uneven widths.
    """
    shape, shapes = boxes[0][1], [shape for _, shape in boxes]
    extra = layout.shape[len(shape) :]
    nbytes, tile = layout.itemsize * math.prod(extra), [1] * len(shape)
    for axis in reversed(range(len(shape))):
        common = math.gcd(*(sizes[axis] for box in boxes for sizes in box))
        tile[axis] = _divisor(common, max(_MOST_CHUNK_BYTES // nbytes, 1))
        nbytes *= tile[axis]
        if any(size[axis] != tile[axis] for size in shapes):
            break
    if nbytes < min(_LEAST_CHUNK_BYTES, *(math.prod(size) * layout.itemsize for size in shapes)):
        return None
    return replace(layout, chunk_shape=(*tile, *extra))


def _divisor(number: int, most: int) -> int:
    """The largest one of a number that is not above `most`."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for one in small for size in (one, number // one) if size <= most)


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Ones, then part of a dimension, then whole ones: a gapless range, cut as stripes are."""
    chunk = [max(size, 1) for size in shape]
    for axis, size in enumerate(chunk):
        inner = math.prod(chunk[axis + 1 :]) * itemsize
        rows = quantum_rows(inner)
        chunk[axis] = min(size, rows)
        if size > 1 and rows > 1:
            break
    return tuple(chunk)


def node_paths(names: Iterable[str]) -> dict[str, str]:
    """Where in the groups each leaf is, by name."""
    names = list(names)
    arrays = set(names)
    return {name: "/".join(map(_encode, _levels(name, arrays))) for name in names}


def _levels(name: str, arrays: set[str]) -> list[str]:
    levels: list[str] = []
    start = 0
    for end in [index for index, char in enumerate(name) if char == "."]:
        # An array cannot be a group too; what follows it stays with it in one piece.
        if name[:end] not in arrays:
            levels.append(name[start:end])
            start = end + 1
    levels.append(name[start:])
    return levels


def _encode(level: str) -> str:
    # zarr takes a backslash for a slash.
    encoded = level.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")
    if not encoded:
        return "%"
    if encoded.startswith("__") or encoded == "zarr.json" or set(encoded) == {"."}:
        return f"%{ord(encoded[0]):02X}{encoded[1:]}"
    return encoded
