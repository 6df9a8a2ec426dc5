"""From the JSON nodes of tensors to their records.

`_tensor` says what a node may hold, and what is wrong with one. Nodes of the usual kind (one chunk,
all of the tensor, row-major) are made into records in a few passes over all of them, which accept
nothing that `_tensor` would not: what they do not accept is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format import elements
from checkpoint.format.bulk.fields import as_crc, as_grains, as_shape, as_size, as_text, check_keys
from checkpoint.format.records import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    ChunkRecord,
    Shape,
    TensorRecord,
)

_TENSOR_KEYS = ("name", "dtype", "shape", "chunks")
_CHUNK_KEYS = ("file", "offset", "nbytes", "crc32c")
_NEEDED_OF_TENSOR, _ALLOWED_OF_TENSOR = set(_TENSOR_KEYS), {*_TENSOR_KEYS, "strides", "storage"}
_GRAINED_KEYS = (*_CHUNK_KEYS, "grains")
_NEEDED_OF_CHUNK, _ALLOWED_OF_CHUNK = set(_CHUNK_KEYS), {*_GRAINED_KEYS, "start", "shape"}
_ORIGINS = [(0,) * dimensions for dimensions in range(MAX_DIMENSIONS + 1)]


_BATCH = 1000
"""Nodes that are passed over at once: as many as stay in the caches of a core."""


def decode_tensors(nodes: Any) -> tuple[TensorRecord, ...]:
    """The records of a list of nodes. Raises ValueError for the first node that is none."""
    if not isinstance(nodes, list):
        raise ValueError("'tensors' is not a list")
    batches = (nodes[first : first + _BATCH] for first in range(0, len(nodes), _BATCH))
    return tuple(chain.from_iterable(map(_decode_batch, batches)))


def _decode_batch(nodes: Sequence[Any]) -> list[TensorRecord]:
    usual = [index for index, node in enumerate(nodes) if _is_usual(node)]
    records = _usual_records([nodes[index] for index in usual])
    if records is None:
        return list(map(_tensor, nodes))
    if len(usual) == len(nodes):
        return records
    by_index = dict(zip(usual, records, strict=True))
    return [by_index.get(index) or _tensor(node) for index, node in enumerate(nodes)]


def _is_usual(node: Any) -> bool:
    if type(node) is not dict or tuple(node) != _TENSOR_KEYS:
        return False
    chunks = node["chunks"]
    if type(chunks) is not list or len(chunks) != 1:
        return False
    chunk = chunks[0]
    return type(chunk) is dict and tuple(chunk) in (_CHUNK_KEYS, _GRAINED_KEYS)


def _usual_records(nodes: Sequence[dict[str, Any]]) -> list[TensorRecord] | None:
    """The records of usual nodes; None if a field of one may not be what it has to be."""
    if not nodes:
        return []
    names, dtypes, shapes, chunks = zip(*map(itemgetter(*_TENSOR_KEYS), nodes), strict=True)
    places = [chunk for (chunk,) in chunks]
    files, offsets, nbytes, crcs = zip(*map(itemgetter(*_CHUNK_KEYS), places), strict=True)
    if not (_all(str, names) and _all(str, dtypes) and _all(list, shapes) and _all(list, crcs)):
        return None
    if not set(dtypes) <= elements.BY_NAME.keys() or max(map(len, shapes)) > MAX_DIMENSIONS:
        return None
    sizes = (*files, *offsets, *nbytes, *chain.from_iterable(shapes))
    sums = _sums(crcs)
    if not _all(int, sizes) or min(sizes) < 0 or max(sizes) > MAX_SIZE or sums is None:
        return None
    wholes = list(map(tuple, shapes))
    origins = [_ORIGINS[len(shape)] for shape in wholes]
    try:
        grains = [as_grains(place["grains"]) if len(place) > 4 else (0, b"") for place in places]
    except ValueError:
        return None
    columns = (files, offsets, nbytes, origins, wholes, sums, *zip(*grains, strict=True))
    records = map(ChunkRecord._make, zip(*columns, strict=True))
    fields = zip(names, dtypes, wholes, zip(records), repeat(None), repeat(None))
    return list(map(TensorRecord._make, fields))


def _all(kind: type, values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {kind}


def _sums(crcs: Sequence[list[Any]]) -> list[tuple[int, ...]] | None:
    """Checksums from lists of eight hexadecimal digits each; None if one may be something else."""
    texts = list(chain.from_iterable(crcs))
    if not _all(str, texts) or not set(map(len, texts)) <= {8}:
        return None
    digits = "".join(texts)
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        return None
    if raw.hex() != digits:
        return None
    sums = iter(np.frombuffer(raw, ">u4").tolist())
    return [tuple(islice(sums, count)) for count in map(len, crcs)]


def _tensor(node: Any) -> TensorRecord:
    """The record of a tensor of any kind."""
    check_keys(node, _NEEDED_OF_TENSOR, _ALLOWED_OF_TENSOR, "tensor")
    name, dtype = as_text(node["name"]), as_text(node["dtype"])
    if dtype not in elements.BY_NAME:
        raise CorruptCheckpointError(f"no dtype {dtype[:40]!r} in this torch", tensor=name)
    shape = as_shape(node["shape"])
    storage = as_shape(node["storage"]) if "storage" in node else None
    if storage is not None and len(storage) != 2:
        raise CorruptCheckpointError("'storage' is not an index and an offset", tensor=name)
    chunks = node["chunks"]
    if type(chunks) is not list:
        raise ValueError("'chunks' is not a list")
    return TensorRecord(
        name,
        dtype,
        shape,
        tuple([_chunk(chunk, shape) for chunk in chunks]),
        as_shape(node["strides"]) if "strides" in node else None,
        None if storage is None else (storage[0], storage[1]),
    )


def _chunk(node: Any, whole: Shape) -> ChunkRecord:
    check_keys(node, _NEEDED_OF_CHUNK, _ALLOWED_OF_CHUNK, "chunk")
    if ("start" in node) != ("shape" in node):
        raise ValueError("a chunk has one of 'start' and 'shape' without the other")
    crcs = node["crc32c"]
    if type(crcs) is not list:
        raise ValueError("'crc32c' is not a list")
    return ChunkRecord(
        as_size(node["file"]),
        as_size(node["offset"]),
        as_size(node["nbytes"]),
        as_shape(node["start"]) if "start" in node else _ORIGINS[len(whole)],
        as_shape(node["shape"]) if "shape" in node else whole,
        tuple([as_crc(crc) for crc in crcs]),
        *(as_grains(node["grains"]) if "grains" in node else ()),
    )
