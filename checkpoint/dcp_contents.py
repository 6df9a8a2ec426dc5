"""What a checkpoint holds in DCP's terms: entries by name, each a tensor in chunks or a value."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.assembly import TensorView, view_of
from checkpoint.dcp_tree import is_blob
from checkpoint.names import Path, natural_name
from checkpoint.opened import OpenCheckpoint
from checkpoint.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.scalars import decode_dtype
from checkpoint.tree import DataNode, decode_tree


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that is in a data file, of a tensor that is whole there."""

    record: TensorRecord
    chunk: ChunkRecord


@dataclass(frozen=True, slots=True)
class _Data:
    """A tensor or array in a decoded tree."""

    view: TensorView
    node: DataNode


class Contents:
    """The entries of a checkpoint. A part of the tree without tensors is one value, and so is every
    part of that, since DCP keeps whole a list that it finds no tensor in."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tensors: dict[str, TensorView] = {}
        self._values: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        tree = decode_tree(manifest.tree, self._data)
        for path, value in _parts((), tree):
            name = natural_name(path)
            self._paths[name] = tuple(key if type(key) is int else str(key) for key in path)
            if isinstance(value, _Data) and "array" not in value.node:
                self._tensors[name] = value.view
            else:
                self._values[name] = value

    def _data(self, path: Path, node: DataNode) -> _Data:
        return _Data(view_of(self._manifest, path, node), node)

    def metadata(self) -> Metadata:
        """For DCP's planner; `storage_data` says where each chunk of a tensor is."""
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in self._values}
        storage: dict[MetadataIndex, StoredChunk | TensorView] = {}
        for name, view in self._tensors.items():
            chunks = []
            for start, shape, where in self._chunks(view):
                chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(shape)))
                storage[MetadataIndex(name, start)] = where
            properties = TensorProperties(dtype=view.dtype)
            state[name] = TensorStorageMetadata(properties, torch.Size(view.shape), chunks)
        return Metadata(state, planner_data=dict(self._paths), storage_data=storage)

    def _chunks(
        self, view: TensorView
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], StoredChunk | TensorView]]:
        record = self._manifest.tensors[view.index]
        if not view.is_whole:
            return [((0,) * len(view.shape), view.shape, view)]
        return [(chunk.start, chunk.shape, StoredChunk(record, chunk)) for chunk in record.chunks]

    def serialised(self, name: str, opened: OpenCheckpoint) -> io.BytesIO:
        """A value as DCP reads it: as DCP wrote it, or what torch.save makes of it."""
        value = self._values[name]
        if isinstance(value, _Data) and is_blob(value.node):
            return io.BytesIO(_read(value.view, opened).tobytes())
        stream = io.BytesIO()
        torch.save(_resolved(value, opened), stream)
        stream.seek(0)
        return stream


def _parts(path: Path, tree: Any) -> Iterator[tuple[Path, Any]]:
    """Every tensor, and every part of the tree that holds none."""
    kind = type(tree)
    if (path and not _holds_tensors(tree)) or isinstance(tree, _Data):
        yield path, tree
    if kind in (dict, OrderedDict):
        for key, item in tree.items():
            yield from _parts((*path, key), item)
    elif kind in (list, tuple):
        for index, item in enumerate(tree):
            yield from _parts((*path, index), item)


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, _Data):
        return "array" not in tree.node
    if type(tree) in (dict, OrderedDict):
        return any(map(_holds_tensors, tree.values()))
    return type(tree) in (list, tuple) and any(map(_holds_tensors, tree))


def _resolved(value: Any, opened: OpenCheckpoint) -> Any:
    """A value with its arrays read."""
    kind = type(value)
    if isinstance(value, _Data):
        dtype = decode_dtype(value.node["dtype"])
        raw, shape = _read(value.view, opened), value.view.shape
        if dtype.itemsize == 0 or raw.size == 0:
            return np.zeros(shape[: len(shape) - (dtype.itemsize == 0)], dtype)
        array = raw.view(dtype)
        return array.reshape(shape if array.size == np.prod(shape, dtype=int) else shape[:-1])
    if kind in (dict, OrderedDict):
        return kind((key, _resolved(item, opened)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(_resolved(item, opened) for item in value)
    return value


def _read(view: TensorView, opened: OpenCheckpoint) -> np.ndarray[Any, Any]:
    count = int(np.prod(view.shape, dtype=int)) * view.dtype.itemsize
    raw = np.empty(count, np.uint8)
    opened.source(view).read(0, raw.data)
    return raw
