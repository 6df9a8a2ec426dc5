"""The storage reader of DCP: gives its planner the boxes it asks for, verified.

A box that is a gapless range of a chunk is read straight to where it goes; of any other box the
bytes from its first to its last element are read, and the box is picked out of them.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from checkpoint.boxes import contiguous_strides, flat_first, span_elements
from checkpoint.dcp_contents import Contents, StoredChunk
from checkpoint.locate import read_manifest
from checkpoint.opened import OpenCheckpoint
from checkpoint.reader import ChunkRead, ReadOptions
from checkpoint.reading import PlacedRead, read_files
from checkpoint.records import Manifest
from checkpoint.saving import STAGING_BYTES, PathLike
from checkpoint.targets import Place, TensorTarget

Finish = Callable[[], None]


class StorageReader(TorchStorageReader):
    """Reads what `torch.distributed.checkpoint.load` asks for, on any number of ranks.

    `path` is a checkpoint of `StorageWriter` or of `checkpoint.save`; of the latter, a part of the
    tree without tensors can be asked for as one value. Every checksum block that is touched is read
    whole and verified, unless `verify` is false.
    """

    def __init__(
        self, path: PathLike, *, verify: bool = True, staging_bytes: int = STAGING_BYTES
    ) -> None:
        super().__init__()
        self.path = Path(path).resolve()
        self._options = ReadOptions(engine=None, staging_bytes=staging_bytes, verify=verify)
        self._load_id = secrets.token_hex(8)
        self._manifest: Manifest | None = None
        self._storage: dict[Any, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).resolve()
        self._manifest = None
        self._load_id = secrets.token_hex(8)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Raises what `checkpoint.load` raises for a missing, incomplete or corrupt checkpoint."""
        metadata = Contents(self._read_manifest()).metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), load_id=self._load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        self._storage = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises CorruptCheckpointError naming file, tensor and extent, or OSError."""
        manifest = self._read_manifest()
        by_file: dict[int, list[PlacedRead]] = defaultdict(list)
        finish: list[Finish] = []
        others: list[ReadItem] = []
        for item in plan.items:
            stored = self._storage.get(item.storage_index)
            if item.type != LoadItemType.BYTE_IO and isinstance(stored, StoredChunk):
                target = planner.resolve_tensor(item).detach()
                read, last_step = _plan_read(stored, item, target)
                by_file[stored.chunk.file].append(read)
                finish += [*last_step, _committed(planner, item, target)]
            else:
                others.append(item)
        read_files(manifest, self.path, by_file, self._options)
        for step in finish:
            step()
        if others:
            self._read_others(manifest, others, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_others(self, manifest: Manifest, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Values, and views of other tensors' bytes."""
        contents = Contents(manifest)
        with OpenCheckpoint(manifest, self.path, verify=self._options.verify) as opened:
            for item in items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, contents.serialised(item.storage_index.fqn, opened))
                    continue
                view = self._storage[item.storage_index]
                whole = torch.empty(view.shape, dtype=view.dtype)
                if whole.numel():
                    raw = whole.reshape(-1).view(torch.uint8).numpy()
                    opened.source(view).read(0, raw.data)
                target = planner.resolve_tensor(item).detach()
                target.copy_(_narrowed(whole, item))
                planner.commit_tensor(item, target)

    def _read_manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self.path)
        return self._manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _plan_read(
    stored: StoredChunk, item: ReadItem, target: torch.Tensor
) -> tuple[PlacedRead, list[Finish]]:
    """What to read for an item, and what is left to do then."""
    chunk, itemsize = stored.chunk, stored.record.element.itemsize
    start, shape = tuple(item.storage_offsets), tuple(item.lengths)
    if tuple(target.shape) != shape:
        raise ValueError(
            f"{item.storage_index.fqn}: the planner gives a tensor of shape {tuple(target.shape)} "
            f"for a box of shape {shape}"
        )
    strides = contiguous_strides(chunk.shape)
    first = sum(low * step for low, step in zip(start, strides, strict=True)) * itemsize
    last = first + span_elements(shape, strides) * itemsize
    if flat_first(chunk.shape, start, shape) is not None:
        place = _shifted(TensorTarget(target).place((0,) * len(shape), shape), first)
        return (ChunkRead(stored.record.name, chunk, first, last), place), []
    span = torch.empty((last - first) // itemsize, dtype=stored.record.element.torch)
    place = _shifted(TensorTarget(span).place((0,), tuple(span.shape)), first)

    def pick() -> None:
        target.copy_(span.as_strided(shape, strides))

    return (ChunkRead(stored.record.name, chunk, first, last), place), [pick]


def _shifted(place: Place, first: int) -> Place:
    """The place of a whole chunk, of which byte `first` goes where `place` begins."""
    if place.address is not None:
        return Place(place.address - first, None)
    deliver = place.deliver
    assert deliver is not None
    return Place(None, lambda at, data: deliver(at - first, data))


def _narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for axis, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(axis, low, size)
    return tensor


def _committed(planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> Finish:
    return lambda: planner.commit_tensor(item, target)
