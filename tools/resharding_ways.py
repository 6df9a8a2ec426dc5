"""Ways in to a checkpoint for ranks that ask for boxes of its tensors, one after the other.

`save_in_boxes` saves what some ranks have of tensors; `sinks`, `named`, `indices` and `planned`
read what others ask for, and check each value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import checkpoint
from checkpoint.format.slices import shared_box

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, shape)."""
Tensors = Mapping[str, torch.Tensor]
Boxes = Callable[[tuple[int, ...]], list[Box]]
"""What each rank has of a tensor of a shape."""


class _Planner:
    """DCP's planner of tensors that are there: gives the parts that items are of."""

    def __init__(self, parts: Mapping[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        self._parts = parts

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self._parts[item.index.fqn, tuple(item.index.offset or ())]

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._parts[item.dest_index.fqn, tuple(item.dest_offsets)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is to be done."""


def save_in_boxes(path: Path, tensors: Tensors, saved: Boxes) -> None:
    """Saves what each rank has, as DCP on so many ranks does."""
    boxes = {name: saved(tuple(tensor.shape)) for name, tensor in tensors.items()}
    count = max(map(len, boxes.values()))
    writer = checkpoint.dcp.StorageWriter(path)
    parts = {
        (name, start): part_of(tensors[name], (start, shape)).contiguous()
        for name, own in boxes.items()
        for start, shape in own
    }
    plans = [
        SavePlan([_write_item(name, tensors[name], own[rank]) for name, own in boxes.items()])
        for rank in range(count)
    ]
    writer.set_up_storage_writer(True)
    orders = writer.prepare_global_plan(plans)
    results = [writer.write_data(order, _Planner(parts)).wait() for order in orders]
    paths = {name: (name,) for name in tensors}
    known: dict[str, Any] = dict.fromkeys(tensors)
    writer.finish(Metadata(known, planner_data=paths), results)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What lies in a box."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def _write_item(name: str, tensor: torch.Tensor, box: Box) -> WriteItem:
    start, shape = box
    chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
    properties = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk, properties, tensor.size())
    return WriteItem(MetadataIndex(name, torch.Size(start)), WriteItemType.SHARD, tensor_data=data)


class _Sink:
    """Takes the rows that a rank asks for."""

    dtype = torch.float32

    def __init__(self, tensor: torch.Tensor, box: Box) -> None:
        inner = math.prod(tensor.shape[1:])
        self.shape = tuple(tensor.shape)
        self.ranges = ((box[0][0] * inner, math.prod(box[1])),)
        self.values = torch.zeros(math.prod(box[1]))
        self._first_byte = self.ranges[0][0] * 4
        self._bytes = self.values.view(torch.uint8)

    def write(self, start: int, data: memoryview) -> None:
        low = max(start, self._first_byte)
        high = min(start + len(data), self._first_byte + self._bytes.numel())
        if low < high:
            given = torch.frombuffer(data[low - start : high - start], dtype=torch.uint8)
            self._bytes[low - self._first_byte : high - self._first_byte].copy_(given)


def sinks(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.load(path, into=)` of sinks that have ranges."""
    into = {name: _Sink(tensors[name], box) for name, box in zip(tensors, boxes, strict=True)}
    checkpoint.load(path, into=into)
    for (name, sink), box in zip(into.items(), boxes, strict=True):
        check(sink.values, part_of(tensors[name], box).reshape(-1))


def named(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.load(path, only=)`, of every other tensor."""
    for name, value in checkpoint.load(path, only=list(tensors)[::2]).items():
        check(value, tensors[name])


def indices(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.open(path)[name][rows, columns]`."""
    with checkpoint.open(path) as lazy:
        for (name, tensor), (start, shape) in zip(tensors.items(), boxes, strict=True):
            index = tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
            check(lazy[name][index], tensor[index])


def planned(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through DCP's reader."""
    reader = checkpoint.dcp.StorageReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items, parts, wholes = [], {}, []
    for (name, tensor), (start, shape) in zip(tensors.items(), boxes, strict=True):
        values = torch.zeros(shape)
        wholes.append((values, part_of(tensor, (start, shape))))
        for chunk in metadata.state_dict_metadata[name].chunks:
            shared = shared_box(tuple(chunk.offsets), tuple(chunk.sizes), start, shape)
            if shared is not None:
                low, size = shared
                inside = tuple(a - b for a, b in zip(low, start, strict=True))
                parts[name, inside] = part_of(values, (inside, size))
                items.append(_read_item(name, tuple(chunk.offsets), shared, inside))
    plan = reader.prepare_local_plan(LoadPlan(items))
    reader.read_data(plan, _Planner(parts)).wait()
    for found, expected in wholes:
        check(found, expected)


def _read_item(name: str, chunk: tuple[int, ...], box: Box, inside: tuple[int, ...]) -> ReadItem:
    low, size = box
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(name, torch.Size(inside)),
        torch.Size(inside),
        MetadataIndex(name, torch.Size(chunk)),
        torch.Size(a - b for a, b in zip(low, chunk, strict=True)),
        torch.Size(size),
    )


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """SystemExit if a value was not read as it was saved."""
    if not torch.equal(found, expected):
        raise SystemExit("what was loaded is not what was saved")
