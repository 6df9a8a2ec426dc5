"""The storage writer of DCP: each hook does its share of the order that `checkpoint.commit` has.

Rank 0 makes the directories when it sees the plans of all, every rank writes and syncs its files,
and rank 0 publishes the manifest in `finish`. The directory of the checkpoint is locked in between.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from aio import Engine, sync_directory
from checkpoint import elements
from checkpoint.commit import check_replaceable, make_directory, publish
from checkpoint.dcp_tree import BLOB_DTYPE, blob_node, build_tree, tensor_node
from checkpoint.destination import Destination
from checkpoint.filling import Filler
from checkpoint.leftovers import clear_leftovers, create_generation, discard_generation, locked
from checkpoint.manifest import encode_manifest
from checkpoint.names import unique_names
from checkpoint.planning import plan_part_files
from checkpoint.rank_files import RankFiles, RankRecords, filling_supplies
from checkpoint.readable import check_files, check_tree
from checkpoint.records import ChunkRecord, FileRecord, Manifest, TensorRecord
from checkpoint.saving import STAGING_BYTES, PathLike, stripe_paths
from checkpoint.sources import Source, array_source, tensor_source
from checkpoint.staging import plan_slots
from checkpoint.striping import Part


@dataclass(frozen=True, slots=True)
class _Order:
    """What rank 0 tells every rank: the save's id, the rank's number, the names in data files."""

    uuid: str
    rank: int
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank reports: its records, and the name in the state dict of each part in them."""

    records: RankRecords
    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Save:
    """What rank 0 remembers of a save: where it goes, and names in data files by those in DCP."""

    destination: Destination
    names: dict[str, str]

    def manifest(
        self, metadata: Metadata, written: Sequence[_Written], *, world_size: int
    ) -> Manifest:
        files, chunks = _by_fqn(written)
        tensors: list[TensorRecord] = []
        leaves: dict[str, Any] = {}
        for fqn, kind in metadata.state_dict_metadata.items():
            own = tuple(chunks.get(fqn, ()))
            if isinstance(kind, TensorStorageMetadata):
                leaves[fqn] = tensor_node(len(tensors))
                dtype, shape = elements.BY_TORCH[kind.properties.dtype].name, tuple(kind.size)
            else:
                leaves[fqn] = blob_node(len(tensors))
                dtype, shape = "uint8", own[0].shape
            tensors.append(TensorRecord(self.names[fqn], dtype, shape, own))
        return Manifest(
            uuid=self.destination.uuid,
            world_size=world_size,
            roots=tuple(str(stripe) for stripe in self.destination.stripes),
            files=files,
            storages=(),
            tensors=tuple(tensors),
            tree=build_tree(leaves, metadata.planner_data),
            saved=time.time_ns(),
        )


def _by_fqn(
    written: Sequence[_Written],
) -> tuple[tuple[FileRecord, ...], dict[str, list[ChunkRecord]]]:
    """All files, and the chunks of every entry of the state dict."""
    files: list[FileRecord] = []
    chunks: dict[str, list[ChunkRecord]] = {}
    for rank in written:
        for part, own in rank.records.chunks.items():
            moved = [chunk._replace(file=chunk.file + len(files)) for chunk in own]
            chunks.setdefault(rank.fqns[part], []).extend(moved)
        files.extend(rank.records.files)
    return tuple(files), chunks


class _Items:
    """What DCP gives one rank to write, as parts of tensors."""

    def __init__(
        self, items: Sequence[WriteItem], planner: SavePlanner, names: Mapping[str, str]
    ) -> None:
        self.sources: list[Source] = []
        self._fqns = tuple(item.index.fqn for item in items)
        self._records: list[TensorRecord] = []
        self._parts: list[Part] = []
        for item in items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                self._add_blob(names[item.index.fqn], data)
            else:
                self._add_tensor(names[item.index.fqn], item, data)

    def _add_blob(self, name: str, data: io.BytesIO) -> None:
        source = array_source(np.frombuffer(data.getbuffer(), BLOB_DTYPE))
        self._add(TensorRecord(name, "uint8", source.shape, ()), (0, 0), source)

    def _add_tensor(self, name: str, item: WriteItem, tensor: torch.Tensor) -> None:
        assert item.tensor_data is not None
        source = tensor_source(tensor.detach().as_subclass(torch.Tensor))
        size, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        if source.shape != tuple(chunk.sizes):
            raise ValueError(
                f"{item.index.fqn} is a tensor of shape {source.shape}, its plan says "
                f"{tuple(chunk.sizes)}"
            )
        self._add(TensorRecord(name, source.element.name, size, ()), tuple(chunk.offsets), source)

    def _add(self, record: TensorRecord, start: tuple[int, ...], source: Source) -> None:
        self._records.append(record)
        self._parts.append(Part(source.element.itemsize, start, source.shape))
        self.sources.append(source)

    def write(self, destination: Destination, rank: int, staging_bytes: int) -> _Written:
        """Writes them to files of this rank, durably."""
        weights = [1.0] * destination.num_stripes
        plans = plan_part_files(
            self._records, self._parts, uuid=destination.uuid, rank=rank, weights=weights
        )
        fillers = [
            Filler(plan, [self.sources[shard.tensor] for shard in plan.shards]) for plan in plans
        ]
        share = staging_bytes // len(plans)
        slots = [plan_slots(plan.layout.nbytes, share) for plan in plans]
        files = RankFiles(destination, rank, fillers)
        files.check_space()
        with Engine(lanes=destination.num_stripes) as engine, ExitStack() as undo:
            files.create(engine, undo)
            files.write(engine, filling_supplies(fillers, slots))
            files.sync()
        for directory in destination.data_directories:
            sync_directory(directory)
        return _Written(files.records(), self._fqns)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


class StorageWriter(TorchStorageWriter):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` give it.

    `path` and `stripe_dirs` are as in `checkpoint.save`, the same on every rank and on file systems
    that all ranks see. A checkpoint at `path` stays whole until the new one takes its place.
    """

    def __init__(
        self,
        path: PathLike,
        stripe_dirs: Sequence[PathLike] | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__()
        self.path = Path(path).resolve()
        self._stripes = stripe_paths(stripe_dirs)
        self._staging_bytes = staging_bytes
        self._save_id = secrets.token_hex(8)
        # Rank 0 holds from its plan to its end: the lock, and what to undo if that is a failure.
        self._lock = ExitStack()
        self._undo = ExitStack()
        self._save: _Save | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._abandon()
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).resolve()
        self._save_id = secrets.token_hex(8)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is made before all plans are known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 locks the checkpoint and makes the directories. Raises OSError."""
        self._abandon()
        destination = Destination(self.path, secrets.token_hex(4), self._stripes)
        try:
            self._begin(destination)
        except BaseException:
            self._abandon()
            raise
        fqns = list(dict.fromkeys(item.index.fqn for plan in plans for item in plan.items))
        names = dict(zip(fqns, unique_names(fqns), strict=True))
        self._save = _Save(destination, names)
        return [
            replace(plan, storage_data=_Order(destination.uuid, rank, names))
            for rank, plan in enumerate(plans)
        ]

    def _begin(self, destination: Destination) -> None:
        if not self.path.exists():
            self._undo.callback(_remove_if_empty, self.path)
        make_directory(self.path)
        self._lock.enter_context(locked(self.path, make=True))
        check_replaceable(self.path)
        clear_leftovers(self.path, self._stripes)
        self._undo.callback(discard_generation, self.path, destination.uuid)
        directories = destination.stripe_directories
        for directory in create_generation(self.path, destination.uuid, directories):
            sync_directory(directory)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank writes its items and makes them durable. Raises OSError naming the file."""
        order: _Order = plan.storage_data
        destination = Destination(self.path, order.uuid, self._stripes)
        items = _Items(plan.items, planner, order.names)
        try:
            written = items.write(destination, order.rank, self._staging_bytes)
        except BaseException:
            self._abandon()
            raise
        # One result of a rank carries what all of them would say.
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, source.nbytes, written if number == 0 else None)
                for number, (item, source) in enumerate(zip(plan.items, items.sources, strict=True))
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 makes the checkpoint exist. Raises OSError naming the file."""
        if self._save is None:
            raise RuntimeError("finish() without prepare_global_plan(): not the coordinator")
        try:
            written = [rank[0].storage_data for rank in results if rank]
            manifest = self._save.manifest(metadata, written, world_size=len(results))
            check_tree(manifest.tree, manifest.tensors, manifest.storages)
            check_files(manifest, self.path)
            publish(self._save.destination, encode_manifest(manifest), self._undo)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Removes what was made and not published, and lets go of the lock."""
        self._save = None
        self._undo.close()
        self._lock.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._abandon()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)
