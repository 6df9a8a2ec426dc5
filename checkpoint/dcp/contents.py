"""What a checkpoint holds in DCP's terms: entries by name, each a tensor in chunks or a value."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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

from checkpoint.dcp.tree import entry_name, is_blob, may_be_of_torch
from checkpoint.format.names import Path
from checkpoint.format.records import ChunkRecord, Manifest, TensorRecord
from checkpoint.format.tree import DataNode, decode_tree
from checkpoint.loading.opened import OpenCheckpoint
from checkpoint.tensors.assembly import TensorView, array_over, view_of


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


_Part = tuple[Path, Any]
"""A part of a tree and its path."""

Storage = dict[MetadataIndex, StoredChunk | TensorView]


class Entries(dict[str, Any]):
    """The entries of a checkpoint as DCP's own flattening has them. Any other part of the tree is
    found by its name, too, and not listed: DCP takes names that it does not expect for a sign of an
    old format.
    """

    def __init__(self, listed: dict[str, Any], find_others: Callable[[], dict[str, Any]]) -> None:
        super().__init__(listed)
        self._find_others = find_others
        self._others: dict[str, Any] | None = None

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._rest()

    def __missing__(self, name: str) -> Any:
        return self._rest()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict."""
        return super().get(name, self._rest().get(name, default))

    def _rest(self) -> dict[str, Any]:
        if self._others is None:
            self._others = self._find_others()
        return self._others


class Contents:
    """The entries of a checkpoint: tensors, and what DCP takes for one value. Dicts are always
    entered, lists where they hold tensors or dicts, tuples never.

    Where two parts of a tree have the same name, neither is found by it.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tree = decode_tree(manifest.tree, self._data)
        self._listed = dict(_by_name(_entries((), self._tree)))

    def _data(self, path: Path, node: DataNode) -> _Data:
        return _Data(view_of(self._manifest, path, node), node)

    def metadata(self) -> Metadata:
        """For DCP's planner; `storage_data` says where each chunk of a tensor is."""
        storage: Storage = {}
        listed = self._described(self._listed, storage)
        paths = {name: path for name, (path, _) in self._listed.items()}

        def find_others() -> dict[str, Any]:
            return self._described(self._others, storage)

        return Metadata(Entries(listed, find_others), planner_data=paths, storage_data=storage)

    def _described(self, parts: Mapping[str, _Part], storage: Storage) -> dict[str, Any]:
        return {
            name: self._tensor(name, value.view, storage)
            if _is_tensor(value)
            else BytesStorageMetadata()
            for name, (_, value) in parts.items()
        }

    @cached_property
    def _others(self) -> dict[str, _Part]:
        parts = _by_name(_parts((), self._tree))
        return {
            name: part for name, part in parts if name not in self._listed and _is_known(part[1])
        }

    def _tensor(self, name: str, view: TensorView, storage: Storage) -> TensorStorageMetadata:
        chunks = []
        for start, shape, where in self._chunks(view):
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(shape)))
            storage[MetadataIndex(name, start)] = where
        properties = TensorProperties(dtype=view.dtype)
        return TensorStorageMetadata(properties, torch.Size(view.shape), chunks)

    def _chunks(
        self, view: TensorView
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], StoredChunk | TensorView]]:
        record = self._manifest.tensors[view.tensor]
        if not view.is_whole:
            return [((0,) * len(view.shape), view.shape, view)]
        return [(chunk.start, chunk.shape, StoredChunk(record, chunk)) for chunk in record.chunks]

    def serialised(self, name: str, opened: OpenCheckpoint, *, is_torchs: bool) -> io.BytesIO:
        """A value as DCP reads it: as DCP wrote it, or what torch.save makes of it. `is_torchs`:
        by torch.load, which reads nothing else. An array of dtype V1 that a program saved is known
        by that.
        """
        _, value = self._listed[name] if name in self._listed else self._others[name]
        if isinstance(value, _Data) and is_blob(value.node):
            written = _read(value.view, opened).tobytes()
            if may_be_of_torch(written) or not is_torchs:
                return io.BytesIO(written)
        stream = io.BytesIO()
        torch.save(_resolved(value, opened), stream)
        stream.seek(0)
        return stream


_MAPPINGS = (dict, OrderedDict, Counter)
"""What a tree has of those; DCP enters all."""


def _by_name(parts: Iterator[_Part]) -> Iterator[tuple[str, _Part]]:
    """Parts by their names, where only one has it; paths as DCP has them."""
    found: dict[str, _Part | None] = {}
    for path, value in parts:
        name = entry_name(path)
        keys = tuple(key if type(key) is int else str(key) for key in path)
        found[name] = None if name in found else (keys, value)
    return ((name, part) for name, part in found.items() if part is not None)


def _entries(path: Path, tree: Any) -> Iterator[_Part]:
    """What DCP's flattening gives of a tree."""
    if type(tree) in _MAPPINGS:
        for key, item in tree.items():
            yield from _entries((*path, key), item)
    elif type(tree) is list and _is_entered(tree):
        for index, item in enumerate(tree):
            yield from _entries((*path, index), item)
    else:
        yield path, tree


def _is_entered(tree: list[Any]) -> bool:
    return any(
        _is_tensor(item) or type(item) in _MAPPINGS or (type(item) is list and _is_entered(item))
        for item in tree
    )


def _parts(path: Path, tree: Any) -> Iterator[_Part]:
    """Every part of a tree but the whole."""
    if path:
        yield path, tree
    if type(tree) in _MAPPINGS:
        for key, item in tree.items():
            yield from _parts((*path, key), item)
    elif type(tree) in (list, tuple):
        for index, item in enumerate(tree):
            yield from _parts((*path, index), item)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Data) and "array" not in value.node


def _is_known(value: Any) -> bool:
    """Whether this is no container of values that DCP alone can read."""
    if type(value) in _MAPPINGS:
        return all(_is_inside(item) for item in value.values())
    return type(value) not in (list, tuple) or all(map(_is_inside, value))


def _is_inside(value: Any) -> bool:
    if isinstance(value, _Data):
        return not is_blob(value.node)
    return _is_known(value)


def _resolved(value: Any, opened: OpenCheckpoint) -> Any:
    """A value with its tensors and arrays read."""
    kind = type(value)
    if isinstance(value, _Data):
        tensor = _read_tensor(value.view, opened)
        return tensor if _is_tensor(value) else array_over(value.node, tensor)
    if kind in _MAPPINGS:
        return kind({key: _resolved(item, opened) for key, item in value.items()})
    if kind in (list, tuple):
        return kind(_resolved(item, opened) for item in value)
    return value


def _read_tensor(view: TensorView, opened: OpenCheckpoint) -> torch.Tensor:
    if 0 in view.shape:
        return torch.empty(view.shape, dtype=view.dtype)
    return torch.from_numpy(_read(view, opened)).view(view.dtype).reshape(view.shape)


def _read(view: TensorView, opened: OpenCheckpoint) -> np.ndarray[Any, Any]:
    count = int(np.prod(view.shape, dtype=int)) * view.dtype.itemsize
    raw = np.empty(count, np.uint8)
    opened.source(view).read(0, raw.data)
    return raw
