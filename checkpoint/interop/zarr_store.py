"""A read-only zarr store over blobs that are read when they are asked for, and checkpoints as such.

`ReadOnlyStore` knows keys and byte ranges; `CheckpointBlobs` knows which bytes of which tensor a
key stands for, and `CheckpointStore` lists them folder by folder: there may be any number of chunks
in an array that is not listed. Importing this imports zarr.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zarr
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from checkpoint.directory.locate import replaced
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.format.tree import data_nodes
from checkpoint.interop.zarr_layout import GROUP_METADATA, ArrayLayout, array_layout, node_paths
from checkpoint.loading.opened import open_current
from checkpoint.tensors.assembly import array_dtype, view_of
from checkpoint.tensors.sources import ByteSource

_MOST_DIGITS = len(str(2**63))


class Blob(Protocol):
    """The bytes of one key."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), both between 0 and nbytes. May block."""
        ...


@dataclass(frozen=True, slots=True)
class BytesBlob:
    """A blob in memory."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]


class ReadOnlyStore(Store):
    """Serves a mapping from keys to blobs. Equal to another one over an equal mapping."""

    def __init__(self, blobs: Mapping[str, Blob], *, read_only: bool = True) -> None:
        super().__init__(read_only=read_only)
        self.blobs = blobs

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, ReadOnlyStore)
            and self.blobs == other.blobs
        )

    __hash__ = Store.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.blobs!r})"

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if not self._is_open:
            await self._open()
        blob = self.blobs.get(key)
        if blob is None:
            return None
        start, stop = _bounds(byte_range, blob.nbytes)
        if isinstance(blob, BytesBlob):
            data = blob.read(start, stop)
        else:
            data = await asyncio.to_thread(blob.read, start, stop)
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        reads = (self.get(key, prototype, byte_range) for key, byte_range in key_ranges)
        return list(await asyncio.gather(*reads))

    async def exists(self, key: str) -> bool:
        return key in self.blobs

    async def getsize(self, key: str) -> int:
        blob = self.blobs.get(key)
        if blob is None:
            raise FileNotFoundError(key)
        return blob.nbytes

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        raise ValueError("checkpoints cannot be changed through zarr")

    async def delete(self, key: str) -> None:
        self._check_writable()
        raise ValueError("checkpoints cannot be changed through zarr")

    async def list(self) -> AsyncIterator[str]:
        for key in list(self.blobs):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in list(self.blobs):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        folder = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
        children = (
            key.removeprefix(folder).split("/", 1)[0]
            for key in list(self.blobs)
            if key.startswith(folder)
        )
        for child in dict.fromkeys(children):
            yield child


def _bounds(request: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    match request:
        case None:
            return 0, nbytes
        case RangeByteRequest(start, end):
            return min(start, nbytes), min(end, nbytes)
        case OffsetByteRequest(offset):
            return min(offset, nbytes), nbytes
        case SuffixByteRequest(suffix):
            return max(nbytes - suffix, 0), nbytes
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}")


@dataclass(frozen=True, slots=True)
class _ChunkBlob:
    """One chunk of an array; what lies beyond the array's edge is zero."""

    source: ByteSource
    layout: ArrayLayout
    index: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.layout.chunk_nbytes

    def read(self, start: int, stop: int) -> bytes:
        first, nbytes = self.layout.chunk_range(self.index)
        data = bytearray(self.nbytes)
        if nbytes:
            self.source.read(first, memoryview(data)[:nbytes])
        return bytes(data[start:stop])


class CheckpointBlobs(Mapping[str, Blob]):
    """What a checkpoint is to zarr: groups, arrays, chunks. Chunks are read, and verified, late."""

    def __init__(
        self,
        path: Path,
        *,
        verify: bool = True,
        uuid: str | None = None,
        moved: Relocation = AS_SAVED,
    ) -> None:
        """With `uuid` of that save alone. Raises FileNotFoundError if another one is there."""
        self._path = path
        self._should_verify = verify
        self._moved = moved
        self._opened = open_current(path, moved, verify=verify)
        manifest = self._opened.manifest
        if uuid is not None and uuid != manifest.uuid:
            self._opened.close()
            raise replaced(uuid, manifest.uuid, path)
        nodes = data_nodes(manifest.tree)
        self._metadata: dict[str, Blob] = {"zarr.json": BytesBlob(GROUP_METADATA.encode())}
        self._arrays: dict[str, tuple[ByteSource, ArrayLayout]] = {}
        for name, place in node_paths(nodes).items():
            source = self._opened.source(view_of(manifest, *nodes[name]))
            layout = array_layout(source.dtype, source.shape, array_dtype(nodes[name][1]))
            self._arrays[place] = source, layout
            for end in [index for index, char in enumerate(place) if char == "/"]:
                self._metadata[f"{place[:end]}/zarr.json"] = BytesBlob(GROUP_METADATA.encode())
            self._metadata[f"{place}/zarr.json"] = BytesBlob(layout.metadata().encode())
        self._folders = _folders(self._metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (
            self._path,
            self._should_verify,
            self._opened.manifest.uuid,
            self._moved,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointBlobs) and (
            (self._path, self._opened.manifest.uuid) == (other._path, other._opened.manifest.uuid)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CheckpointBlobs({str(self._path)!r})"

    def __getitem__(self, key: str) -> Blob:
        if key in self._metadata:
            return self._metadata[key]
        # Groups and arrays may be called `c` as well; an index never is.
        separator = "/c" if key.endswith("/c") else "/c/"
        place, found, index = key.rpartition(separator)
        if not found or place not in self._arrays:
            raise KeyError(key)
        source, layout = self._arrays[place]
        numbers = tuple(_number(part) for part in index.split("/") if part)
        grid = layout.grid
        if len(numbers) != len(grid) or "/".join(map(str, numbers)) != index:
            raise KeyError(key)
        if not all(0 <= number < count for number, count in zip(numbers, grid, strict=True)):
            raise KeyError(key)
        return _ChunkBlob(source, layout, numbers)

    def __iter__(self) -> Iterator[str]:
        yield from self._metadata
        for place, (_, layout) in self._arrays.items():
            for index in layout.chunk_indices():
                yield "/".join([place, "c", *map(str, index)])

    def __len__(self) -> int:
        """As far as a length can tell: views of one element may have more chunks than that."""
        chunks = sum(math.prod(layout.grid) for _, layout in self._arrays.values())
        return min(len(self._metadata) + chunks, sys.maxsize)

    def children(self, folder: str) -> Iterator[str]:
        """Names in a folder, one after the other; none in what is no folder."""
        yield from self._folders.get(folder, ())
        if folder in self._arrays:
            if math.prod(self._arrays[folder][1].grid):
                yield "c"
            return
        place, found, index = f"{folder}/".rpartition("/c/")
        if not found or place not in self._arrays:
            return
        numbers, grid = index.rstrip("/"), self._arrays[place][1].grid
        depth = len(numbers.split("/")) if numbers else 0
        if depth < len(grid) and "/".join([place, "c", *_first(numbers, grid)]) in self:
            yield from map(str, range(grid[depth]))

    def below(self, folder: str, start: str = "") -> Iterator[str]:
        """Keys in a folder and the folders in it, of names that begin with `start`."""
        for name in self.children(folder):
            if name.startswith(start):
                path = f"{folder}/{name}" if folder else name
                if path in self:
                    yield path
                else:
                    yield from self.below(path)


def _number(part: str) -> int:
    """Of a chunk along a dimension; -1 for what is none, as what has more digits than sizes have:
    Python refuses to read thousands.
    """
    return int(part) if part.isdecimal() and len(part) <= _MOST_DIGITS else -1


def _first(numbers: str, grid: tuple[int, ...]) -> list[str]:
    """The index of the first chunk in a folder of chunks."""
    given = numbers.split("/") if numbers else []
    return given + ["0"] * (len(grid) - len(given))


def _folders(keys: Iterable[str]) -> dict[str, list[str]]:
    """The names in each folder that there is by these keys."""
    folders: dict[str, dict[str, None]] = {}
    for key in keys:
        while key:
            folder, _, name = key.rpartition("/")
            names = folders.setdefault(folder, {})
            if name in names:
                break
            names[name] = None
            key = folder
    return {folder: list(names) for folder, names in folders.items()}


class CheckpointStore(ReadOnlyStore):
    """A checkpoint as a store: only what a listing asks for is gone through."""

    def __init__(self, blobs: CheckpointBlobs, *, read_only: bool = True) -> None:
        super().__init__(blobs, read_only=read_only)
        self.checkpoint = blobs

    async def list(self) -> AsyncIterator[str]:
        for key in self.checkpoint:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        folder, _, start = prefix.rpartition("/")
        for key in self.checkpoint.below(folder, start):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in self.checkpoint.children(prefix.rstrip("/")):
            yield name


def _reopen(path: Path, verify: bool, uuid: str, moved: Relocation) -> CheckpointBlobs:
    """In another process, or later: the same save or none."""
    return CheckpointBlobs(path, verify=verify, uuid=uuid, moved=moved)


def open_group(path: Path, *, verify: bool, moved: Relocation = AS_SAVED) -> zarr.Group:
    """The root group of a checkpoint."""
    store = CheckpointStore(CheckpointBlobs(path, verify=verify, moved=moved))
    return zarr.open_group(store, mode="r", zarr_format=3)
